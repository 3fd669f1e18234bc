"""Group-shrink: the groups that have rows, moved to the front of a short list on the device.

A grouped GEMM over 464 groups of which eight have rows would look at every group for every tile;
with the list it looks at eight. Each block owns 1024 groups, and two launches do it: the first sums
each block's groups, tiles and rows, the second adds up the sums of the blocks before its own. One
block that walked over 65,536 groups would need 64 steps that wait for each other's loads. Up to
1024 groups there is one block and one launch.

Shape suffixes: G groups, B blocks of groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.reference import group_shrink_ref

_BLOCK = 1024


def group_shrink(counts_G: Tensor, block_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Move the groups that have rows to the front, in order, without a host sync.

    Args:
        counts_G: Rows of each group, ``(G,)`` int32; at most 2**31 - 1 together.
        block_rows: Rows of one tile of the GEMM that follows.

    Returns:
        All int32. The active groups, ``(G,)``, filled up with -1; the first packed row and the
        first tile of each, ``(G,)``, filled up with the numbers of rows and of tiles, so that both
        ascend to the end; and the numbers of active groups, of tiles and of rows, ``(3,)``.

    Raises:
        ConfigError: Another dtype, shape or layout, or ``block_rows`` is below 1.

    Example:
        ``counts=[0, 3, 0, 5]`` with tiles of 4 rows gives ``active=[1, 3, -1, -1]``,
        ``offsets=[0, 3, 8, 8]``, ``tiles=[0, 1, 3, 3]`` and ``totals=[2, 3, 8]``.
    """
    check_tensor("counts_G", counts_G, (torch.int32,), 1)
    check_at_least("block_rows", block_rows, 1)
    active_G, offsets_G, tiles_G, totals_3 = _op(counts_G, block_rows)
    return active_G, offsets_G, tiles_G, totals_3


def launch(counts_G: Tensor, block_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the kernels."""
    active_G, offsets_G, tiles_G, totals_3 = _fake(counts_G, block_rows)
    num_groups = counts_G.shape[0]
    blocks = max(triton.cdiv(num_groups, _BLOCK), 1)
    sums_3B = counts_G.new_empty((3, blocks))
    with on_device(counts_G):
        if blocks > 1:
            _sum_kernel[(blocks,)](counts_G, sums_3B, num_groups, block_rows, blocks, BLOCK=_BLOCK)
        _shrink_kernel[(blocks,)](
            counts_G,
            sums_3B,
            active_G,
            offsets_G,
            tiles_G,
            totals_3,
            num_groups,
            block_rows,
            BLOCKS=blocks,
            BLOCKS_POWER=triton.next_power_of_2(blocks),
            BLOCK=_BLOCK,
        )
    return active_G, offsets_G, tiles_G, totals_3


def _fake(counts_G: Tensor, block_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lists = [torch.empty_like(counts_G) for _ in range(3)]
    return lists[0], lists[1], lists[2], counts_G.new_empty(3)


@triton.jit
def _load_block(
    counts_G: tl.tensor, num_groups: tl.tensor, block_rows: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return this block's groups and of each: is it active, its tiles, its rows."""
    groups = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(counts_G + groups, mask=groups < num_groups, other=0)
    # not (rows + block_rows - 1) // block_rows, which could pass 2**31
    tiles = rows // block_rows + (rows % block_rows > 0).to(tl.int32)
    return groups, (rows > 0).to(tl.int32), tiles, rows


@triton.jit(do_not_specialize=["num_groups", "blocks"])
def _sum_kernel(
    counts_G: tl.tensor,
    sums_3B: tl.tensor,
    num_groups: tl.tensor,
    block_rows: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Add up each block's active groups, tiles and rows."""
    _, active, tiles, rows = _load_block(counts_G, num_groups, block_rows, BLOCK)
    sum_B = sums_3B + tl.program_id(0)
    tl.store(sum_B, tl.sum(active, axis=0))
    tl.store(sum_B + blocks, tl.sum(tiles, axis=0))
    tl.store(sum_B + 2 * blocks, tl.sum(rows, axis=0))


@triton.jit(do_not_specialize=["num_groups"])
def _shrink_kernel(
    counts_G: tl.tensor,
    sums_3B: tl.tensor,
    active_G: tl.tensor,
    offsets_G: tl.tensor,
    tiles_G: tl.tensor,
    totals_3: tl.tensor,
    num_groups: tl.tensor,
    block_rows: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_POWER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write each active group behind those of the blocks before, and this block's part of the rest.

    Example:
        Blocks of 2 over ``counts=[0, 3, 0, 5]``: the second block finds one active group before
        it and writes group 3 to place 1; place 1 of 2, its other place 3 is filled up.
    """
    groups, active, tiles, rows = _load_block(counts_G, num_groups, block_rows, BLOCK)
    if BLOCKS == 1:
        before_active = 0
        before_tiles = 0
        before_rows = 0
        num_active = tl.sum(active, axis=0)
        num_tiles = tl.sum(tiles, axis=0)
        num_rows = tl.sum(rows, axis=0)
    else:
        blocks = tl.arange(0, BLOCKS_POWER)
        sums_B = sums_3B + blocks
        is_before = blocks < tl.program_id(0)
        active_B = tl.load(sums_B, mask=blocks < BLOCKS, other=0)
        tiles_B = tl.load(sums_B + BLOCKS, mask=blocks < BLOCKS, other=0)
        rows_B = tl.load(sums_B + 2 * BLOCKS, mask=blocks < BLOCKS, other=0)
        before_active = tl.sum(tl.where(is_before, active_B, 0), axis=0)
        before_tiles = tl.sum(tl.where(is_before, tiles_B, 0), axis=0)
        before_rows = tl.sum(tl.where(is_before, rows_B, 0), axis=0)
        num_active = tl.sum(active_B, axis=0)
        num_tiles = tl.sum(tiles_B, axis=0)
        num_rows = tl.sum(rows_B, axis=0)

    places = before_active + tl.cumsum(active, axis=0) - active
    tl.store(active_G + places, groups, mask=active > 0)
    tl.store(offsets_G + places, before_rows + tl.cumsum(rows, axis=0) - rows, mask=active > 0)
    tl.store(tiles_G + places, before_tiles + tl.cumsum(tiles, axis=0) - tiles, mask=active > 0)
    rest = (groups >= num_active) & (groups < num_groups)
    tl.store(active_G + groups, -1, mask=rest)
    tl.store(offsets_G + groups, num_rows, mask=rest)
    tl.store(tiles_G + groups, num_tiles, mask=rest)
    if tl.program_id(0) == 0:
        tl.store(totals_3, num_active)
        tl.store(totals_3 + 1, num_tiles)
        tl.store(totals_3 + 2, num_rows)


_op = define_op(
    "group_shrink(Tensor counts_G, int block_rows) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=launch,
    twin=group_shrink_ref,
    fake=_fake,
)
