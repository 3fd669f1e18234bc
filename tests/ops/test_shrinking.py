"""group_shrink: the kernel in the interpreter against the twin, and the twin by hand."""

from __future__ import annotations

import pytest
import torch

from torch_eaas.errors import ConfigError
from torch_eaas.ops.reference import group_shrink_ref
from torch_eaas.ops.shrinking import group_shrink, launch

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def random_counts(num_groups: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_groups)
    counts = torch.randint(0, 200, (num_groups,), generator=generator)
    is_active = torch.rand(num_groups, generator=generator) < 0.3
    numbers: list[int] = (counts * is_active).tolist()
    return numbers


COUNTS = [
    pytest.param([], id="no groups"),
    pytest.param([0], id="one group, no rows"),
    pytest.param([2], id="one group"),
    pytest.param([0, 3, 0, 5], id="the docstring's"),
    pytest.param([0] * 63, id="none of 63"),
    pytest.param([1] * 64, id="all of 64, one row each"),
    pytest.param([129] + [0] * 64, id="first of 65 only"),
    pytest.param([0] * 126 + [1], id="last of 127 only"),
    pytest.param([0] * 127 + [300], id="last of 128 only"),
    pytest.param([127, 128, 129] * 43, id="all of 129, at the edge of a tile"),
    pytest.param([2 if g else 6000 for g in range(64)], id="one expert has 98 %"),
    pytest.param(random_counts(300), id="random of 300"),
    pytest.param(random_counts(1024), id="1024, just one block"),
    pytest.param([0] * 1024 + [1], id="1025, the second block has one"),
    pytest.param([1] + [0] * 1025, id="1026, the second block has none"),
    pytest.param(random_counts(3333), id="random of 3333, four blocks"),
    pytest.param([2**31 - 1], id="as many rows as fit"),
]


@pytest.mark.parametrize("block_rows", [1, 16, 128])
@pytest.mark.parametrize("counts", COUNTS)
def test_the_kernel_gives_what_the_twin_gives(counts: list[int], block_rows: int) -> None:
    counts_G = torch.tensor(counts, dtype=torch.int32)
    for got, expected in zip(
        launch(counts_G, block_rows), group_shrink_ref(counts_G, block_rows), strict=True
    ):
        assert got.dtype == expected.dtype == torch.int32
        assert torch.equal(got, expected)


@pytest.mark.parametrize("counts", COUNTS)
def test_the_twin_lists_each_group_that_has_rows_with_all_that_come_before(
    counts: list[int],
) -> None:
    expected_active, expected_offsets, expected_tiles = [], [], []
    rows = tiles = 0
    for group, count in enumerate(counts):
        if count:
            expected_active.append(group)
            expected_offsets.append(rows)
            expected_tiles.append(tiles)
        rows += count
        tiles += (count + 15) // 16
    rest = len(counts) - len(expected_active)
    active_G, offsets_G, tiles_G, totals_3 = group_shrink_ref(
        torch.tensor(counts, dtype=torch.int32), 16
    )
    assert active_G.tolist() == expected_active + [-1] * rest
    assert offsets_G.tolist() == expected_offsets + [rows] * rest
    assert tiles_G.tolist() == expected_tiles + [tiles] * rest
    assert totals_3.tolist() == [len(expected_active), tiles, rows]


def test_the_example_of_the_docstring_holds() -> None:
    lists = group_shrink(torch.tensor([0, 3, 0, 5], dtype=torch.int32), 4)
    assert [numbers.tolist() for numbers in lists] == [
        [1, 3, -1, -1],
        [0, 3, 8, 8],
        [0, 1, 3, 3],
        [2, 3, 8],
    ]


def test_counts_of_another_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"counts_G must be int32, got torch.int64; cast it"):
        group_shrink(torch.zeros(4, dtype=torch.int64), 16)


def test_counts_in_two_dimensions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"counts_G must have 1 dimensions, got shape \(2, 3\)"):
        group_shrink(torch.zeros((2, 3), dtype=torch.int32), 16)


def test_counts_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"counts_G must be contiguous, got strides \(2,\)"):
        group_shrink(torch.zeros(6, dtype=torch.int32)[::2], 16)


def test_tiles_of_no_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_rows must be an integer of at least 1, got 0"):
        group_shrink(torch.zeros(4, dtype=torch.int32), 0)
