"""What the tests of ops share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.ops.implementations import implementation

__all__ = ["implementation"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give time to whichever test comes first of those that share one run of compilers."""
    for item in items:
        if hasattr(getattr(item, "module", None), "LAUNCHES"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(autouse=True)
def no_numpy_warnings() -> Iterator[None]:
    """Let Triton's interpreter, which computes in numpy, meet NaN and Inf as silently as a GPU."""
    with np.errstate(all="ignore"):
        yield
