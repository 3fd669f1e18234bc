"""Which rows belong to which group, found on the host: a CPU server needs the counts there.

Shape suffix: R rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


def sorted_rows(groups_R: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[int], list[int]]:
    """Return the rows that have a group, sorted stably by it, the active groups, and their rows.

    Example:
        ``groups=[2, -1, 0, 2]`` gives ``rows=[2, 0, 3]``, ``active=[0, 2]``, ``counts=[1, 2]``.
    """
    order_R = groups_R.argsort(kind="stable")
    # -1 sorts first
    rows = Counter(groups_R[order_R].tolist())
    order_N = order_R[rows.pop(-1, 0) :]
    return order_N, list(rows), list(rows.values())


def pieces(counts: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield first and last group (exclusive) of pieces of at most ``most`` rows, or of one group.

    Example:
        ``counts=[2, 1, 9, 1]`` in pieces of 4 gives ``(0, 2), (2, 3), (3, 4)``.
    """
    first = rows = 0
    for at, count in enumerate(counts):
        if rows and rows + count > most:
            yield first, at
            first, rows = at, 0
        rows += count
    if rows:
        yield first, len(counts)
