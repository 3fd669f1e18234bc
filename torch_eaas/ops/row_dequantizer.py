"""FP8 rows with one scale for each 128 numbers back to plain ones: what other GEMMs multiply with.

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
    check_scales,
    check_slots,
    check_tensor,
    define_op,
    on_device,
)
from torch_eaas.ops.reference import dequantize_rows_ref
from torch_eaas.ops.slot_tokens import find_tokens, load_counts
from torch_eaas.protocol.layout import SCALE_COLUMNS

_ROWS = 4


def dequantize_rows(
    x_MK: Tensor,
    scale_Mk: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_tokens_S: Tensor | None = None,
) -> Tensor:
    """Bring rows back that ``quantize_rows`` stored with one scale for each 128 columns.

    Args:
        x_MK: Rows, ``(M, K)`` float8_e4m3fn.
        scale_Mk: Their scales, ``(M, ceil(K / 128))`` fp32.
        dtype: What to return: fp32, bf16 or fp16.
        num_tokens_S: Tokens that each slot holds, ``(S,)`` int32, where the M rows are S slots with
            room for M / S tokens each. Rows beyond are neither read nor written.

    Returns:
        ``(M, K)``: each number times its scale, rounded once to fp32 and then to ``dtype``.

    Raises:
        ConfigError: Another dtype, shape or layout.

    Example:
        The row ``[448, 1]`` with the scale ``[2]`` gives ``[896, 2]``.
    """
    check_tensor("x_MK", x_MK, (torch.float8_e4m3fn,), 2)
    check_scales("scale_Mk", scale_Mk, x_MK)
    if dtype not in FLOATS:
        raise ConfigError(f"dtype must be torch.float32, bfloat16 or float16, got {dtype}")
    check_slots(num_tokens_S, x_MK.shape[0])
    out: Tensor = _op(x_MK, scale_Mk, num_tokens_S, dtype)
    return out


def launch(
    x_MK: Tensor, scale_Mk: Tensor, num_tokens_S: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Run the kernel."""
    out_MK = _fake(x_MK, scale_Mk, num_tokens_S, dtype)
    num_rows, num_columns = x_MK.shape
    if x_MK.numel() == 0:
        return out_MK
    num_slots = 1 if num_tokens_S is None else num_tokens_S.shape[0]
    column_blocks = scale_Mk.shape[1]
    walkers = triton.cdiv(blocks_on(x_MK.device, 32), column_blocks)
    with on_device(x_MK):
        _dequantize_kernel[(min(triton.cdiv(num_rows, _ROWS), walkers), column_blocks)](
            x_MK,
            scale_Mk,
            num_tokens_S,
            out_MK,
            num_rows,
            num_columns,
            num_slots,
            num_rows // num_slots,
            SLOTS=triton.next_power_of_2(num_slots),
            ROWS=_ROWS,
            BLOCK=SCALE_COLUMNS,
            num_warps=1,
        )
    return out_MK


def _fake(
    x_MK: Tensor, scale_Mk: Tensor, num_tokens_S: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(x_MK, dtype=dtype)


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _dequantize_kernel(
    x_MK: tl.tensor,
    scale_Mk: tl.tensor,
    num_tokens_S: tl.tensor,
    out_MK: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_slots: tl.tensor,
    room: tl.tensor,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Multiply tiles of ``ROWS`` rows and one block of columns with their scales."""
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
        scale_at_R = scale_Mk + rows_R * num_blocks + tl.program_id(1)
        scale_R = tl.load(scale_at_R, mask=here_R, other=1.0)
        out_RB = (x_RB * scale_R[:, None]).to(out_MK.dtype.element_ty)
        tl.store(out_MK + offsets_RB, out_RB, mask=mask_RB)


_op = define_op(
    "dequantize_rows(Tensor x_MK, Tensor scale_Mk, Tensor? num_tokens_S, ScalarType dtype)"
    " -> Tensor",
    kernel=launch,
    twin=dequantize_rows_ref,
    fake=_fake,
)
