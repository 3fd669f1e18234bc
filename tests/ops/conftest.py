"""What the tests of ops share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.ops.implementations import implementation

__all__ = ["implementation"]


@pytest.fixture(autouse=True)
def no_numpy_warnings() -> Iterator[None]:
    """Let Triton's interpreter, which computes in numpy, meet NaN and Inf as silently as a GPU."""
    with np.errstate(all="ignore"):
        yield
