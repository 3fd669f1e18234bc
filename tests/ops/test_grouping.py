"""Rows sorted by group against loops over them."""

from __future__ import annotations

import numpy as np
import pytest

from torch_eaas.ops.grouping import pieces, sorted_rows

GROUPS = {
    "no rows": [],
    "nobody": [-1, -1, -1],
    "one": [4],
    "the same": [2, 2, 2],
    "example": [2, -1, 0, 2],
    "large numbers": [65535, 3, -1, 65535, 0],
    "many": np.random.default_rng(0).integers(-1, 9, 63).tolist(),
    "skewed": [7 if row % 50 else row % 3 for row in range(300)],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_rows_are_sorted_by_group_and_keep_their_order_within(groups: list[int]) -> None:
    order, active, counts = sorted_rows(np.array(groups, dtype=np.int64))
    expected = {
        group: [r for r, g in enumerate(groups) if g == group] for group in sorted({*groups})
    }
    expected.pop(-1, None)
    assert active == list(expected)
    assert counts == [len(rows) for rows in expected.values()]
    assert order.tolist() == [row for rows in expected.values() for row in rows]


@pytest.mark.parametrize(
    ("counts", "most", "expected"),
    [
        ([], 4, []),
        ([1], 4, [(0, 1)]),
        ([2, 1, 9, 1], 4, [(0, 2), (2, 3), (3, 4)]),
        ([4, 4], 4, [(0, 1), (1, 2)]),
        ([2, 2, 1], 4, [(0, 2), (2, 3)]),
        ([9, 9], 1, [(0, 1), (1, 2)]),
    ],
    ids=str,
)
def test_pieces_are_as_large_as_they_may_be(
    counts: list[int], most: int, expected: list[tuple[int, int]]
) -> None:
    assert list(pieces(counts, most)) == expected
