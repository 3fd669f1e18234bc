"""The Triton kernel of the grouped GEMM, for 16 and 32 bit numbers and for block-scaled FP8.

Shape suffixes: M rows of a tile, N outputs, K inputs, k blocks of 128 inputs, n blocks of 128
outputs, S slots of the slab of matrices, G groups, R packed rows.

**A tile** is ``BLOCK_M`` rows of one group times ``BLOCK_N`` outputs. The matrix is the left side
of each product and the rows are the right one, so the accumulator is ``(BLOCK_N, BLOCK_M)``:
Hopper's wgmma has 64 on its left and 8 to 256 on its right, so that 16 rows run the same kind of
instruction as 128 do.

**The walk.** The grid is fixed. Program p computes pieces p, p + P, p + 2 P, ... and stops behind
the last piece of the compact list, whatever G is. Within a group the tiles of rows come first and
the outputs second: neighbours then read the same part of a matrix while the cache has it.

**The sum** over K is made by one program in one fp32 accumulator, in blocks of ``BLOCK_K`` that
ascend. Only ``SPLIT_K > 1`` cuts it into parts, each with an output of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torch_eaas.ops.gemm_config import INPUT_BYTES
from torch_eaas.ops.launching import blocks_on, on_device

SCALE_BLOCK = tl.constexpr(128)
"""Inputs, and of a matrix outputs too, that share one scale."""

_NO_TILE = tl.constexpr(2**31 - 1)

_CHUNK = 512


def launch(
    x_MK: Tensor,
    weights_SNK: Tensor,
    rows_R: Tensor | None,
    slots_G: Tensor | None,
    counts_G: Tensor,
    active_G: Tensor,
    offsets_G: Tensor,
    tiles_G: Tensor,
    totals_3: Tensor,
    gather_div: int,
    block_rows: int,
    config: Sequence[int],
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    may_describe: bool = True,
) -> Tensor:
    """Run the kernel, whose grid is fixed by shapes and the device.

    Args:
        x_MK: As ``grouped_gemm`` takes it; so are all that follow, but these.
        weights_SNK: The slab.
        rows_R: Source rows, or None.
        slots_G: Slots, or None.
        counts_G: With those that follow, the lists of ``ActiveGroups``.
        active_G: Active groups.
        offsets_G: Their first rows.
        tiles_G: Their first tiles.
        totals_3: Active groups, tiles, rows.
        gather_div: What ``rows_R`` is divided by.
        block_rows: Rows of a tile.
        config: block_n, stages, warps, programs, split_k.
        scales: Those of x and of the slab, where both are FP8.
        out_dtype: None: x's.
        may_describe: Read matrices by a tensor descriptor (TMA) where device and layout allow it.
    """
    (slots, outputs, inputs), num_groups = weights_SNK.shape, counts_G.shape[0]
    num_rows = x_MK.shape[0] if rows_R is None else rows_R.shape[0]
    _, _, _, programs, split_k = config
    dtype = x_MK.dtype if out_dtype is None else out_dtype
    part_dtype = dtype if split_k == 1 else torch.float32
    parts = x_MK.new_empty((split_k, num_rows, outputs), dtype=part_dtype)
    tiles = _tiles(inputs, x_MK.element_size(), num_groups, block_rows, config)
    is_described = may_describe and _may_describe(weights_SNK)
    # without inputs, or without any matrix, there is still something to write
    if parts.numel() and num_groups:
        with on_device(x_MK):
            grouped_gemm_kernel[(blocks_on(x_MK.device, programs),)](
                x_MK,
                _descriptor(weights_SNK, tiles) if is_described else weights_SNK,
                parts,
                *(scales or (None, None)),
                *(rows_R, slots_G, counts_G, active_G, offsets_G, tiles_G, totals_3),
                *(outputs, inputs, slots, num_rows),
                GATHER_DIV=gather_div,
                SCALED=scales is not None,
                DESCRIPTOR=is_described,
                UPCAST=not isinstance(grouped_gemm_kernel, triton.JITFunction),
                **tiles,
            )
    return parts[0] if split_k == 1 else parts.sum(0).to(dtype)


def _tiles(
    inputs: int, element_size: int, num_groups: int, block_rows: int, config: Sequence[int]
) -> dict[str, Any]:
    """Return the kernel's constants that say how it is cut into tiles."""
    block_n, stages, warps, _, split_k = config
    block_k = INPUT_BYTES // element_size
    return {
        "EVEN_K": inputs % block_k == 0,
        "BLOCK_M": block_rows,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLIT_K": split_k,
        "CHUNK": _CHUNK,
        "HALVINGS": (triton.cdiv(num_groups, _CHUNK) - 1).bit_length(),
        "num_warps": warps,
        "num_stages": stages,
    }


def _may_describe(weights_SNK: Tensor) -> bool:
    """Is there TMA, and does the slab have the alignment and the size that it needs?"""
    device = weights_SNK.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return False
    slots, outputs, inputs = weights_SNK.shape
    is_aligned = inputs * weights_SNK.element_size() % 16 == 0 and weights_SNK.data_ptr() % 16 == 0
    return is_aligned and inputs > 0 and 0 < slots * outputs < 2**31


def _descriptor(weights_SNK: Tensor, tiles: dict[str, Any]) -> Any:
    slots, outputs, inputs = weights_SNK.shape
    block = [tiles["BLOCK_N"], tiles["BLOCK_K"]]
    return TensorDescriptor(weights_SNK, [slots * outputs, inputs], [inputs, 1], block)


@triton.jit
def _find_place(
    tiles_G: tl.tensor,
    num_active: tl.tensor,
    tile: tl.tensor,
    CHUNK: tl.constexpr,
    HALVINGS: tl.constexpr,
) -> tl.tensor:
    """Return the place, in the compact list, of the group that a tile belongs to.

    Halvings of ``CHUNK << HALVINGS`` places lead to one chunk, which is looked at as a whole.

    Example:
        ``tiles=[0, 2, 5]``: tile 4 belongs to place 1, tile 5 to place 2.
    """
    begin = 0
    # no while: what follows one loses its alignment in Triton's eyes, and is read number by number
    for halving in tl.static_range(HALVINGS):
        middle = begin + (CHUNK << (HALVINGS - 1 - halving))
        first = tl.load(tiles_G + middle, mask=middle < num_active, other=_NO_TILE)
        begin = tl.where(first <= tile, middle, begin)
    places = begin + tl.arange(0, CHUNK)
    firsts = tl.load(tiles_G + places, mask=places < num_active, other=_NO_TILE)
    return begin + tl.sum((firsts <= tile).to(tl.int32), axis=0) - 1


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def grouped_gemm_kernel(
    x_MK: tl.tensor,
    weights_SNK: tl.tensor,
    out_RN: tl.tensor,
    x_scale_Mk: tl.tensor,
    weight_scale_Snk: tl.tensor,
    rows_R: tl.tensor,
    slots_G: tl.tensor,
    counts_G: tl.tensor,
    active_G: tl.tensor,
    offsets_G: tl.tensor,
    tiles_G: tl.tensor,
    totals_3: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    num_slots: tl.tensor,
    num_rows: tl.tensor,
    GATHER_DIV: tl.constexpr,
    SCALED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    UPCAST: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    CHUNK: tl.constexpr,
    HALVINGS: tl.constexpr,
) -> None:
    """Multiply each active group's rows with the transpose of its matrix.

    ``weights_SNK`` is a pointer, or with ``DESCRIPTOR`` a tensor descriptor of ``(S * N, K)``.
    Scales, ``rows_R`` and ``slots_G`` may be None. ``UPCAST`` is for Triton's interpreter, whose
    bf16 arithmetic is wrong.
    """
    num_active = tl.load(totals_3)
    outputs = tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(K, BLOCK_K)
    scale_blocks = tl.cdiv(K, SCALE_BLOCK)
    pieces = tl.load(totals_3 + 1) * outputs * SPLIT_K
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        # which rows of which group, which outputs, which part of the sum
        place = _find_place(tiles_G, num_active, piece // (outputs * SPLIT_K), CHUNK, HALVINGS)
        group = tl.load(active_G + place)
        count = tl.load(counts_G + group)
        within = piece - tl.load(tiles_G + place) * (outputs * SPLIT_K)
        row_tiles = tl.cdiv(count, BLOCK_M)
        rows_M = within % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        first_output = within // row_tiles % outputs * BLOCK_N
        split = 0
        if SPLIT_K > 1:
            split = within // (row_tiles * outputs)

        # where those rows and that matrix are
        here_M = rows_M < count
        packed_M = (tl.load(offsets_G + place) + rows_M).to(tl.int64)
        source_M = packed_M
        if rows_R is not None:
            source_M = (tl.load(rows_R + packed_M, mask=here_M, other=0) // GATHER_DIV).to(tl.int64)
        slot = group
        if slots_G is not None:
            slot = tl.load(slots_G + group)
        held = (slot >= 0) & (slot < num_slots)
        x_M = x_MK + source_M * K
        outputs_N = first_output + tl.arange(0, BLOCK_N)
        if not DESCRIPTOR:
            weights_N = weights_SNK + (slot.to(tl.int64) * N + outputs_N) * K
        if SCALED:
            scale_M = x_scale_Mk + source_M * scale_blocks
            scale_row = slot.to(tl.int64) * tl.cdiv(N, SCALE_BLOCK) + first_output // SCALE_BLOCK
            matrix_scale = weight_scale_Snk + scale_row * scale_blocks

        per_split = tl.cdiv(blocks, SPLIT_K)
        end = tl.where(held, tl.minimum((split + 1) * per_split, blocks), 0)
        acc_NM = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for block in range(split * per_split, end):
            inputs_K = block * BLOCK_K + tl.arange(0, BLOCK_K)
            mask_MK = here_M[:, None]
            if not EVEN_K:
                mask_MK = mask_MK & (inputs_K < K)[None, :]
            tile_MK = tl.load(x_M[:, None] + inputs_K[None, :], mask=mask_MK, other=0.0)
            if DESCRIPTOR:
                tile_NK = weights_SNK.load([slot * N + first_output, block * BLOCK_K])
            else:
                mask_NK = (outputs_N < N)[:, None]
                if not EVEN_K:
                    mask_NK = mask_NK & (inputs_K < K)[None, :]
                tile_NK = tl.load(weights_N[:, None] + inputs_K[None, :], mask=mask_NK, other=0.0)
            if UPCAST:
                tile_MK = tile_MK.to(tl.float32)
                tile_NK = tile_NK.to(tl.float32)
            if SCALED:
                # a column's sum: it keeps Triton from loading each scale in every thread that
                # needs it, through as many 64 bit addresses
                scales_M = tl.load((scale_M + block)[:, None], mask=here_M[:, None], other=0.0)
                scale = tl.sum(scales_M, axis=1) * tl.load(matrix_scale + block)
                acc_NM += tl.dot(tile_NK, tl.trans(tile_MK)) * scale[None, :]
            else:
                acc_NM = tl.dot(tile_NK, tl.trans(tile_MK), acc_NM, input_precision="ieee")

        # rows whose matrix is not here must not pass for a result
        acc_NM = tl.where(held, acc_NM, float("nan"))
        if SPLIT_K > 1:
            packed_M += tl.cast(split, tl.int64) * num_rows
        out_M = out_RN + packed_M * N
        tl.store(
            out_M[:, None] + outputs_N[None, :],
            tl.trans(acc_NM).to(out_RN.dtype.element_ty),
            mask=here_M[:, None] & (outputs_N < N)[None, :],
        )
