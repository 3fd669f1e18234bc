"""Tiles of a grouped GEMM: which are chosen, which are refused."""

from __future__ import annotations

import pytest

from torch_eaas.errors import ConfigError
from torch_eaas.ops.gemm_config import (
    ROW_TILES,
    GemmConfig,
    candidates,
    choose_block_rows,
    default_config,
)


@pytest.mark.parametrize(
    ("max_rows", "num_groups", "expected"),
    [
        pytest.param(0, 0, 16, id="nothing"),
        pytest.param(1, 464, 16, id="one row"),
        pytest.param(256, 464, 16, id="the docstring's first"),
        pytest.param(2048, 464, 16, id="a decode batch, 4.4 rows a group"),
        pytest.param(16 * 10, 10, 16, id="16 a group"),
        pytest.param(16 * 10 + 1, 10, 32, id="just above 16"),
        pytest.param(63 * 10, 10, 64, id="63 a group"),
        pytest.param(65_536, 512, 128, id="the docstring's second"),
        pytest.param(100_000, 1, 128, id="one group"),
    ],
)
def test_tiles_have_the_mean_groups_rows(max_rows: int, num_groups: int, expected: int) -> None:
    assert choose_block_rows(max_rows, num_groups) == expected


@pytest.mark.parametrize("block_rows", ROW_TILES)
def test_the_default_is_a_candidate_and_all_candidates_keep_bits(block_rows: int) -> None:
    assert default_config(block_rows).batch_invariant
    found = candidates(block_rows)
    assert default_config(block_rows) in found
    assert len(found) == len(set(found))
    assert all(config.split_k == 1 for config in found)


def test_sums_may_be_cut_when_bits_may_change() -> None:
    found = candidates(16, batch_invariant=False)
    assert {config.split_k for config in found} == {1, 2, 4, 8}
    assert not any(config.batch_invariant for config in found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_n": 256}, "block_n must be one of 64, 128, got 256"),
        ({"warps": 2}, "warps must be one of 4, 8, got 2"),
        ({"stages": 0}, "stages must be an integer of at least 1, got 0"),
        ({"programs": 0}, "programs must be an integer of at least 1, got 0"),
        (
            {"split_k": 2},
            "split_k is 2, but a batch-invariant sum has one part; pass batch_invariant=False",
        ),
        ({"split_k": 0, "batch_invariant": False}, "split_k must be an integer of at least 1"),
    ],
)
def test_other_tiles_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GemmConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("choose", [default_config, candidates])
def test_tiles_of_other_rows_are_refused(choose: object) -> None:
    with pytest.raises(ConfigError, match="block_rows must be one of 16, 32, 64, 128, 256, got 48"):
        choose(48)  # type: ignore[operator]


def test_no_rows_below_zero() -> None:
    with pytest.raises(ConfigError, match="max_rows must be an integer of at least 0, got -1"):
        choose_block_rows(-1, 4)
    with pytest.raises(ConfigError, match="num_groups must be an integer of at least 0, got -1"):
        choose_block_rows(1, -1)
