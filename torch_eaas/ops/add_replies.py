"""The client adds its servers' answers on the GPU, where they lie in its windows.

A token's numbers are added in fp32 in an order that does not depend on what came first: by pair in
`partial` mode, by k in `exact` mode. There is nothing but sums, so the bits are the twin's.

Shape suffixes: see ``pair_table``; T tokens of the batch, D hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops.launching import FLOATS, check_tensor, define_op, on_device
from torch_eaas.ops.pair_table import ClientTables
from torch_eaas.ops.reference_client import add_replies_ref
from torch_eaas.ops.windows import BEHIND_HEADER, reply_slot_at

_BLOCK = 1024
_REPLY_DTYPES = (torch.float32, torch.bfloat16)


def add_replies(
    tables: ClientTables,
    places_PT: Tensor,
    gate: Tensor,
    add_TD: Tensor,
    *,
    reply_dtype: torch.dtype,
    exact_ids_TK: Tensor | None = None,
    pairs_E: Tensor | None = None,
) -> Tensor:
    """Add the answers of one stage's requests, and what else is to be added, all in one launch.

    Args:
        tables: The client's pairs; the answers lie in the slots that the requests took.
        places_PT: Where each token lies in each pair's request, as ``share_tokens`` said.
        gate: The stage's gate, ``(1,)`` int64; if it is not 0, no window is read.
        add_TD: What is added last, ``(T, D)``: the shared expert's output, or zeros.
        reply_dtype: The pairs' reply dtype, fp32 or bf16.
        exact_ids_TK: The expert ids, ``(T, K)`` int32, where the pairs' mode is `exact`.
        pairs_E: With them, the pair that ran each expert, ``(E,)`` int32.

    Returns:
        ``(T, D)`` in ``add_TD``'s dtype: behind a closed gate, ``add_TD``.

    Raises:
        ConfigError: Another dtype, shape or layout.

    Example:
        Pair 0 answered token 1 with ``[5]``, pair 1 tokens 0 and 1 with ``[1]`` and ``[2]``, so
        ``places=[[-1, 0], [0, 1]]``; with ``add=[[10], [20]]`` the result is ``[[11], [27]]``.
    """
    check_tensor("places_PT", places_PT, (torch.int32,), 2)
    check_tensor("add_TD", add_TD, FLOATS, 2)
    if reply_dtype not in _REPLY_DTYPES:
        raise ConfigError(f"reply_dtype must be float32 or bfloat16, got {reply_dtype}")
    if (exact_ids_TK is None) != (pairs_E is None):
        raise ConfigError("exact_ids_TK and pairs_E go together: give both, or none of them")
    if exact_ids_TK is not None:
        check_tensor("exact_ids_TK", exact_ids_TK, (torch.int32,), 2)
    out_TD: Tensor = _op(
        tables.pairs_PC,
        tables.slots_P,
        places_PT,
        gate,
        add_TD,
        exact_ids_TK,
        pairs_E,
        reply_dtype == torch.bfloat16,
    )
    return out_TD


def launch(
    pairs_PC: Tensor,
    slots_P: Tensor,
    places_PT: Tensor,
    gate: Tensor,
    add_TD: Tensor,
    exact_ids_TK: Tensor | None,
    pairs_E: Tensor | None,
    is_bf16: bool,
) -> Tensor:
    """Run the kernel: a row of programs a token."""
    out_TD = torch.empty_like(add_TD)
    num_tokens, hidden = add_TD.shape
    if not add_TD.numel():
        return out_TD
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    with on_device(pairs_PC):
        _add_kernel[(num_tokens, triton.cdiv(hidden, block))](
            pairs_PC,
            slots_P,
            places_PT,
            gate,
            add_TD,
            exact_ids_TK,
            pairs_E,
            out_TD,
            len(places_PT),
            num_tokens,
            0 if pairs_E is None else len(pairs_E),
            hidden,
            TOP_K=0 if exact_ids_TK is None else exact_ids_TK.shape[1],
            DTYPE=tl.bfloat16 if is_bf16 else tl.float32,
            BLOCK=block,
        )
    return out_TD


def _fake(
    pairs_PC: Tensor, slots_P: Tensor, places_PT: Tensor, gate: Tensor, add_TD: Tensor, *_: object
) -> Tensor:
    return torch.empty_like(add_TD)


@triton.jit
def _load_row(
    pairs_PC: tl.tensor,
    slots_P: tl.tensor,
    pair: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    hidden: tl.tensor,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Load some columns of one row of a pair's answer, in fp32."""
    slot = tl.load(slots_P + pair)
    rows = (reply_slot_at(pairs_PC, pair, slot) + BEHIND_HEADER).to(tl.pointer_type(DTYPE))
    return tl.load(rows + row * hidden + column, mask=column < hidden, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_pairs", "num_tokens", "num_experts"])
def _add_kernel(
    pairs_PC: tl.tensor,
    slots_P: tl.tensor,
    places_PT: tl.tensor,
    gate: tl.tensor,
    add_TD: tl.tensor,
    exact_ids_TK: tl.tensor,
    pairs_E: tl.tensor,
    out_TD: tl.tensor,
    num_pairs: tl.tensor,
    num_tokens: tl.tensor,
    num_experts: tl.tensor,
    hidden: tl.tensor,
    TOP_K: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add up some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if tl.load(gate) == 0:
        if TOP_K == 0:
            for p in range(num_pairs):
                place = tl.load(places_PT + p * num_tokens + token).to(tl.int64)
                if place >= 0:
                    total += _load_row(pairs_PC, slots_P, p, place, column, hidden, DTYPE)
        else:
            for k in range(TOP_K):
                expert = tl.load(exact_ids_TK + token * TOP_K + k)
                is_expert = (expert >= 0) & (expert < num_experts)
                pair = tl.load(pairs_E + expert, mask=is_expert, other=-1).to(tl.int64)
                if pair >= 0:
                    place = tl.load(places_PT + pair * num_tokens + token).to(tl.int64)
                    row = place * TOP_K + k
                    total += _load_row(pairs_PC, slots_P, pair, row, column, hidden, DTYPE)
    at = token * hidden + column
    total += tl.load(add_TD + at, mask=column < hidden, other=0.0).to(tl.float32)
    tl.store(out_TD + at, total, mask=column < hidden)


_op = define_op(
    "add_replies(Tensor pairs_PC, Tensor slots_P, Tensor places_PT, Tensor gate, Tensor add_TD, "
    "Tensor? exact_ids_TK, Tensor? pairs_E, bool is_bf16) -> Tensor",
    kernel=launch,
    twin=add_replies_ref,
    fake=_fake,
)
