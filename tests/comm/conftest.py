from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.comm.fake_cuda", "tests.comm.transport_contract", "tests.comm.unix_contract"
)
