"""Rows in another number format; only tokens that there are cost time.

Shape suffixes: M rows, K columns, S slots, B columns of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.ops.launching import (
    FLOATS,
    blocks_on,
    check_slots,
    check_tensor,
    define_op,
    on_device,
)
from torch_eaas.ops.reference import cast_rows_ref
from torch_eaas.ops.slot_tokens import find_tokens, load_counts

_MAX_BLOCK = 1024


def cast_rows(x_MK: Tensor, dtype: torch.dtype, num_tokens_S: Tensor) -> Tensor:
    """Return rows in another number format, or as they are if it is theirs.

    Args:
        x_MK: Rows, ``(M, K)``, fp32, bf16 or fp16: S slots with room for M / S tokens each.
        dtype: Fp32, bf16 or fp16.
        num_tokens_S: Tokens that each slot holds, ``(S,)`` int32. Rows beyond are neither read nor
            written.

    Raises:
        ConfigError: Another dtype, shape or layout.

    Example:
        With ``num_tokens=[1, 0]``, of ``[[1.5], [7.]]`` only the first row is cast.
    """
    check_tensor("x_MK", x_MK, FLOATS, 2)
    check_slots(num_tokens_S, len(x_MK))
    if x_MK.dtype == dtype:
        return x_MK
    out_MK: Tensor = _op(x_MK, dtype, num_tokens_S)
    return out_MK


def launch(x_MK: Tensor, dtype: torch.dtype, num_tokens_S: Tensor) -> Tensor:
    """Run the kernel."""
    out_MK = _fake(x_MK, dtype, num_tokens_S)
    num_rows, num_columns = x_MK.shape
    num_slots = num_tokens_S.shape[0]
    block = min(_MAX_BLOCK, triton.next_power_of_2(num_columns))
    column_blocks = triton.cdiv(num_columns, block)
    walkers = triton.cdiv(blocks_on(x_MK.device, 32), column_blocks)
    with on_device(x_MK):
        _cast_kernel[(min(num_rows, walkers), column_blocks)](
            x_MK,
            num_tokens_S,
            out_MK,
            num_columns,
            num_slots,
            num_rows // num_slots,
            SLOTS=triton.next_power_of_2(num_slots),
            BLOCK=block,
        )
    return out_MK


def _fake(x_MK: Tensor, dtype: torch.dtype, num_tokens_S: Tensor) -> Tensor:
    return torch.empty_like(x_MK, dtype=dtype)


@triton.jit(do_not_specialize=["num_slots", "room"])
def _cast_kernel(
    x_MK: tl.tensor,
    num_tokens_S: tl.tensor,
    out_MK: tl.tensor,
    num_columns: tl.tensor,
    num_slots: tl.tensor,
    room: tl.tensor,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Walk over tokens; each program casts one block of columns."""
    columns_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here_B = columns_B < num_columns
    ends_S = tl.cumsum(load_counts(num_tokens_S, tl.arange(0, SLOTS), num_slots, room), axis=0)
    for number in range(tl.program_id(0), tl.max(ends_S, axis=0), tl.num_programs(0)):
        row = tl.max(find_tokens(tl.full((1,), number, tl.int32), ends_S, room), axis=0)
        at_B = tl.cast(row, tl.int64) * num_columns + columns_B
        x_B = tl.load(x_MK + at_B, mask=here_B, other=0.0).to(tl.float32)
        tl.store(out_MK + at_B, x_B.to(out_MK.dtype.element_ty), mask=here_B)


_op = define_op(
    "cast_rows(Tensor x_MK, ScalarType dtype, Tensor num_tokens_S) -> Tensor",
    kernel=launch,
    twin=cast_rows_ref,
    fake=_fake,
)
