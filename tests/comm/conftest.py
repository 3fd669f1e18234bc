from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.comm.transport_contract")
