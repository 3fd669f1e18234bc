"""The experts' rows back into token order: weighted and added up, or each by itself.

A token's sum is made by one block in the order of its experts, k = 0, 1, ..., and product and sum
are rounded one by one, as the twin does: so the bits depend on that token's rows alone.

Shape suffixes: N packed rows, D hidden, T tokens, K experts per token, S slots, B columns of a
block.
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
from torch_eaas.ops.reference import combine_rows_ref
from torch_eaas.ops.slot_tokens import find_tokens, load_counts

_MAX_BLOCK = 1024


def combine_rows(
    rows_ND: Tensor,
    places_TK: Tensor,
    weights_TK: Tensor,
    *,
    per_expert: bool = False,
    num_tokens_S: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight the experts' rows and bring them back into token order.

    Args:
        rows_ND: Experts' outputs in packed order, ``(N, D)``, fp32, bf16 or fp16.
        places_TK: Where ``pack`` put each (token, expert), ``(T, K)`` int32; -1 for none.
        weights_TK: Final router weights, ``(T, K)`` fp32; one beside -1 is not looked at.
        per_expert: Return one row per (token, expert) instead of their sum per token.
        num_tokens_S: Tokens that each slot holds, ``(S,)`` int32, where the T tokens are S slots
            with room for T / S each. What lies beyond is neither read nor written.
        out_dtype: Fp32, or bf16 or fp16, to which each sum or row is rounded once, at its end.

    Returns:
        ``(T, D)`` sums in order of k, or ``(T, K, D)`` rows. Zero where no expert was.

    Raises:
        ConfigError: Another dtype, shape or layout.

    Example:
        Rows ``[[1], [2], [3]]`` at places ``[[2, 0], [1, -1]]`` with weights ``[[10, 1], [5, 9]]``
        give ``[[31], [10]]``.
    """
    check_tensor("rows_ND", rows_ND, FLOATS, 2)
    check_tensor("places_TK", places_TK, (torch.int32,), 2)
    check_tensor("weights_TK", weights_TK, (torch.float32,), 2)
    if places_TK.shape != weights_TK.shape:
        raise ConfigError(
            f"weights_TK must have the shape of places_TK, {tuple(places_TK.shape)}, "
            f"got {tuple(weights_TK.shape)}"
        )
    check_slots(num_tokens_S, places_TK.shape[0])
    if out_dtype not in FLOATS:
        raise ConfigError(f"out_dtype must be float32, bfloat16 or float16, got {out_dtype}")
    out: Tensor = _op(rows_ND, places_TK, weights_TK, per_expert, num_tokens_S, out_dtype)
    return out


def launch(
    rows_ND: Tensor,
    places_TK: Tensor,
    weights_TK: Tensor,
    per_expert: bool,
    num_tokens_S: Tensor | None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Run the kernel."""
    out = _fake(rows_ND, places_TK, weights_TK, per_expert, num_tokens_S, out_dtype)
    (num_tokens, top_k), hidden = places_TK.shape, rows_ND.shape[1]
    if out.numel() == 0:
        return out
    num_slots = 1 if num_tokens_S is None else num_tokens_S.shape[0]
    block = min(triton.next_power_of_2(hidden), _MAX_BLOCK)
    column_blocks = triton.cdiv(hidden, block)
    walkers = triton.cdiv(blocks_on(out.device, 16), column_blocks)
    with on_device(out):
        _combine_kernel[(min(num_tokens, walkers), column_blocks)](
            rows_ND,
            places_TK,
            weights_TK,
            num_tokens_S,
            out,
            num_tokens,
            hidden,
            num_slots,
            num_tokens // num_slots,
            SLOTS=triton.next_power_of_2(num_slots),
            TOP_K=top_k,
            PER_EXPERT=per_expert,
            BLOCK=block,
            enable_fp_fusion=False,
        )
    return out


def _fake(
    rows_ND: Tensor,
    places_TK: Tensor,
    weights_TK: Tensor,
    per_expert: bool,
    num_tokens_S: Tensor | None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    leading = tuple(places_TK.shape) if per_expert else (places_TK.shape[0],)
    return rows_ND.new_empty((*leading, rows_ND.shape[1]), dtype=out_dtype)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def _combine_kernel(
    rows_ND: tl.tensor,
    places_TK: tl.tensor,
    weights_TK: tl.tensor,
    num_tokens_S: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    hidden: tl.tensor,
    num_slots: tl.tensor,
    room: tl.tensor,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PER_EXPERT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Walk over tokens; each program adds up one block of columns."""
    columns_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here_B = columns_B < hidden
    end = num_tokens
    if num_tokens_S is not None:
        ends_S = tl.cumsum(load_counts(num_tokens_S, tl.arange(0, SLOTS), num_slots, room), axis=0)
        end = tl.max(ends_S, axis=0)
    for number in range(tl.program_id(0), end, tl.num_programs(0)):
        token = number
        if num_tokens_S is not None:
            token = tl.max(find_tokens(tl.full((1,), number, tl.int32), ends_S, room), axis=0)
        first = tl.cast(token, tl.int64) * TOP_K
        sum_B = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(TOP_K):
            place = tl.load(places_TK + first + k).to(tl.int64)
            weight = tl.load(weights_TK + first + k, mask=place >= 0, other=0.0)
            row = rows_ND + place * hidden + columns_B
            row_B = tl.load(row, mask=here_B & (place >= 0), other=0.0).to(tl.float32)
            if PER_EXPERT:
                to = out + (first + k) * hidden + columns_B
                tl.store(to, (weight * row_B).to(out.dtype.element_ty), mask=here_B)
            else:
                sum_B += weight * row_B
        if not PER_EXPERT:
            to = out + tl.cast(token, tl.int64) * hidden + columns_B
            tl.store(to, sum_B.to(out.dtype.element_ty), mask=here_B)


_op = define_op(
    "combine_rows(Tensor rows_ND, Tensor places_TK, Tensor weights_TK, bool per_expert, "
    "Tensor? num_tokens_S, ScalarType out_dtype=float) -> Tensor",
    kernel=launch,
    twin=combine_rows_ref,
    fake=_fake,
)
