"""Rows to FP8 with one scale for each 128 numbers: what an FP8 GEMM multiplies with.

Shape suffixes: M rows, K columns, k blocks of columns, S slots, R rows of a tile, B columns of one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops.launching import (
    FLOATS,
    blocks_on,
    check_slots,
    check_tensor,
    define_op,
    on_device,
)
from torch_eaas.ops.reference import quantize_rows_ref
from torch_eaas.ops.slot_tokens import find_tokens, load_counts

_ROWS = 4


def quantize_rows(
    x_MK: Tensor, block: int = 128, *, num_tokens_S: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Store rows as FP8 with one scale for each block of columns.

    Args:
        x_MK: Rows, ``(M, K)``, fp32, bf16 or fp16.
        block: Columns that share a scale, a power of two; the last block may be smaller.
        num_tokens_S: Tokens that each slot holds, ``(S,)`` int32, where the M rows are S slots with
            room for M / S tokens each. Rows beyond are neither read nor written.

    Returns:
        ``(M, K)`` float8_e4m3fn, and ``(M, ceil(K / block))`` fp32: a block's largest magnitude
        over 448, and 1 where it is all zero. NaN or Inf in a block makes its scale so too.

    Raises:
        ConfigError: Another dtype, shape or layout.

    Example:
        ``[[448, 1, 896, 2]]`` in blocks of 2 gives ``[[448, 1, 448, 1]]`` and scales ``[[1, 2]]``.
    """
    check_tensor("x_MK", x_MK, FLOATS, 2)
    if block < 1 or block & (block - 1):
        raise ConfigError(f"block must be a power of two, got {block}; checkpoints use 128")
    check_slots(num_tokens_S, x_MK.shape[0])
    out_MK, scale_Mk = _op(x_MK, block, num_tokens_S)
    return out_MK, scale_Mk


def launch(x_MK: Tensor, block: int, num_tokens_S: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the kernel."""
    out_MK, scale_Mk = _fake(x_MK, block, num_tokens_S)
    launch_into(x_MK, block, num_tokens_S, out_MK, scale_Mk)
    return out_MK, scale_Mk


def launch_into(
    x_MK: Tensor, block: int, num_tokens_S: Tensor | None, out_MK: Tensor, scale_Mk: Tensor
) -> None:
    """Run the kernel into tensors that are there; fp32 ``out_MK`` shows what the cast is given."""
    num_rows, num_columns = x_MK.shape
    if x_MK.numel() == 0:
        return
    num_slots = 1 if num_tokens_S is None else num_tokens_S.shape[0]
    column_blocks = triton.cdiv(num_columns, block)
    walkers = triton.cdiv(blocks_on(x_MK.device, 32), column_blocks)
    with on_device(x_MK):
        _quantize_kernel[(min(triton.cdiv(num_rows, _ROWS), walkers), column_blocks)](
            x_MK,
            num_tokens_S,
            out_MK,
            scale_Mk,
            num_rows,
            num_columns,
            num_slots,
            num_rows // num_slots,
            SLOTS=triton.next_power_of_2(num_slots),
            ROWS=_ROWS,
            BLOCK=block,
            num_warps=1,
        )


def _fake(x_MK: Tensor, block: int, num_tokens_S: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, columns = x_MK.shape
    scale_Mk = x_MK.new_empty((rows, -(-columns // block)), dtype=torch.float32)
    return torch.empty_like(x_MK, dtype=torch.float8_e4m3fn), scale_Mk


@triton.jit
def scale_tile(x_RB: tl.tensor) -> tl.tensor:
    """Return fp32 rows divided by their scales, and the scales, ``(R,)``.

    The largest magnitude is found among bits, which order numbers of one sign as their values do:
    so NaN is above Inf and is found. Division is exact to the last bit, as on the CPU.
    """
    bits_RB = x_RB.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_R = tl.max(bits_RB, axis=1).to(tl.float32, bitcast=True)
    scale_R = tl.div_rn(largest_R, tl.full(largest_R.shape, 448.0, tl.float32))
    scale_R = tl.where(scale_R == 0, 1.0, scale_R)
    return tl.div_rn(x_RB, tl.broadcast_to(scale_R[:, None], x_RB.shape)), scale_R


@triton.jit(do_not_specialize=["num_rows", "num_slots", "room"])
def _quantize_kernel(
    x_MK: tl.tensor,
    num_tokens_S: tl.tensor,
    out_MK: tl.tensor,
    scale_Mk: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_slots: tl.tensor,
    room: tl.tensor,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Scale and cast tiles of ``ROWS`` rows and one block of columns."""
    columns_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    num_blocks = tl.num_programs(1)
    end = num_rows
    if num_tokens_S is not None:
        ends_S = tl.cumsum(load_counts(num_tokens_S, tl.arange(0, SLOTS), num_slots, room), axis=0)
        end = tl.max(ends_S, axis=0)
    for start in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        numbers_R = start + tl.arange(0, ROWS)
        here_R = numbers_R < end
        if num_tokens_S is not None:
            numbers_R = find_tokens(numbers_R, ends_S, room)
        rows_R = numbers_R.to(tl.int64)
        offsets_RB = rows_R[:, None] * num_columns + columns_B[None, :]
        mask_RB = here_R[:, None] & (columns_B < num_columns)[None, :]
        x_RB = tl.load(x_MK + offsets_RB, mask=mask_RB, other=0.0).to(tl.float32)
        scaled_RB, scale_R = scale_tile(x_RB)
        tl.store(out_MK + offsets_RB, scaled_RB.to(out_MK.dtype.element_ty), mask=mask_RB)
        tl.store(scale_Mk + rows_R * num_blocks + tl.program_id(1), scale_R, mask=here_R)


_op = define_op(
    "quantize_rows(Tensor x_MK, int block, Tensor? num_tokens_S) -> (Tensor, Tensor)",
    kernel=launch,
    twin=quantize_rows_ref,
    fake=_fake,
)
