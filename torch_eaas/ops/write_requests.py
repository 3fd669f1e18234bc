"""The client puts requests into its servers' windows on the GPU: payload, header, then the word.

Payloads are copied as bits, with plain stores: what travels is what the caller gave.

Shape suffixes: see ``pair_table``; N tokens of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.ops.launching import (
    WIRE_DTYPES,
    check_scales,
    check_tensor,
    define_op,
    on_device,
)
from torch_eaas.ops.pair_table import ClientTables
from torch_eaas.ops.reference_client import write_requests_ref
from torch_eaas.ops.windows import (
    BEHIND_HEADER,
    EPOCH,
    HIDDEN_OFFSET,
    INSTANCE,
    REQUEST_BUDGET,
    REQUEST_EPOCH,
    REQUEST_FLAGS,
    REQUEST_INSTANCE,
    REQUEST_LAYER,
    REQUEST_SEQUENCE,
    REQUEST_TOKENS,
    REQUEST_VERSION,
    REQUESTS,
    SCALES_OFFSET,
    WEIGHTS_OFFSET,
    alignment_of,
    arrive,
    copy_units,
    of_pair,
    request_slot_at,
    scale_units,
    store_4,
    store_8,
    units_of,
    word_at,
)
from torch_eaas.ops.words import REQUEST, next_word, sequence_of, store_word

_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class Shares:
    """A batch as it is shared among the pairs: which tokens each gets, and for which experts."""

    counts_P: Tensor
    """Tokens of each pair's request, int32; 0 makes none."""
    tokens_PT: Tensor
    """Which tokens of the batch these are, int32; only the first ``counts_P`` are looked at."""
    ids_PTK: Tensor
    """Their expert ids, int32, -1 where the expert is another server's."""
    weights_PTK: Tensor
    """Their router weights, fp32."""

    def __post_init__(self) -> None:
        check_tensor("counts_P", self.counts_P, (torch.int32,), 1)
        check_tensor("tokens_PT", self.tokens_PT, (torch.int32,), 2)
        check_tensor("ids_PTK", self.ids_PTK, (torch.int32,), 3)
        check_tensor("weights_PTK", self.weights_PTK, (torch.float32,), 3)


def write_requests(
    tables: ClientTables,
    shares: Shares,
    x_ND: Tensor,
    gate: Tensor,
    arrivals_P: Tensor,
    *,
    layer: int,
    version: Tensor,
    budget_us: int,
    blocks: int = 1,
    scales_Nd: Tensor | None = None,
) -> None:
    """Write one request to each pair that has tokens, all in one launch.

    Args:
        tables: The client's pairs; the words of the slots that are used advance.
        shares: Who gets what. No request may have more tokens than its window's slots.
        x_ND: The batch, ``(N, D)`` in the pairs' wire dtype.
        gate: The stage's gate, ``(1,)`` int64; if it is not 0, nothing is written or advanced.
        arrivals_P: A counter for each pair, ``(P,)`` int32, 0 before and after.
        layer: The layer that the ids belong to.
        version: The newest placement that the host knows, ``(1,)`` int64.
        budget_us: How long the answers will be waited for.
        blocks: Thread blocks that share one pair's payload.
        scales_Nd: Where the wire dtype is fp8, the batch's scales as ``quantize_rows`` gives them.

    Raises:
        ConfigError: Another dtype, shape or layout, or scales and the wire dtype do not fit.

    Example:
        Pair 1 gets tokens 0 and 2 of a batch: ``counts=[0, 2]``, ``tokens=[[0, 0], [0, 2]]``.
    """
    check_tensor("x_ND", x_ND, WIRE_DTYPES, 2)
    check_scales("scales_Nd", scales_Nd, x_ND)
    check_tensor("arrivals_P", arrivals_P, (torch.int32,), 1)
    check_at_least("budget_us", budget_us, 1)
    check_at_least("blocks", blocks, 1)
    _op(
        tables.pairs_PC,
        tables.slots_P,
        tables.words_PS,
        shares.counts_P,
        shares.tokens_PT,
        shares.ids_PTK,
        shares.weights_PTK,
        x_ND,
        scales_Nd,
        gate,
        arrivals_P,
        version,
        layer,
        budget_us,
        blocks,
    )


def launch(
    pairs_PC: Tensor,
    slots_P: Tensor,
    words_PS: Tensor,
    counts_P: Tensor,
    tokens_PT: Tensor,
    ids_PTK: Tensor,
    weights_PTK: Tensor,
    x_ND: Tensor,
    scales_Nd: Tensor | None,
    gate: Tensor,
    arrivals_P: Tensor,
    version: Tensor,
    layer: int,
    budget_us: int,
    blocks: int,
) -> None:
    """Run the kernel: ``blocks`` programs a pair."""
    pairs, max_tokens, top_k = ids_PTK.shape
    x_NU = units_of(x_ND)
    with on_device(pairs_PC):
        _write_kernel[(pairs, blocks)](
            pairs_PC,
            slots_P,
            words_PS,
            counts_P,
            tokens_PT,
            ids_PTK,
            weights_PTK.view(torch.int32),
            x_NU,
            None if scales_Nd is None else scales_Nd.view(torch.int32),
            gate,
            arrivals_P,
            version,
            layer,
            budget_us,
            words_PS.shape[1],
            max_tokens,
            TOP_K=top_k,
            UNITS=x_NU.shape[1],
            UNIT_BYTES=x_NU.element_size(),
            ALIGNED=alignment_of(x_NU),
            **scale_units(scales_Nd),
            BLOCK=_BLOCK,
            num_warps=8,
        )


@triton.jit(do_not_specialize=["layer", "budget_us", "num_slots", "max_tokens"])
def _write_kernel(
    pairs_PC: tl.tensor,
    slots_P: tl.tensor,
    words_PS: tl.tensor,
    counts_P: tl.tensor,
    tokens_PT: tl.tensor,
    ids_PTK: tl.tensor,
    weights_PTK: tl.tensor,
    x_NU: tl.tensor,
    scales_Nd: tl.tensor,
    gate: tl.tensor,
    arrivals_P: tl.tensor,
    version: tl.tensor,
    layer: tl.tensor,
    budget_us: tl.tensor,
    num_slots: tl.tensor,
    max_tokens: tl.tensor,
    TOP_K: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_ALIGNED: tl.constexpr,
    SCALES_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy each ``blocks``-th row of one pair's payload; the last block to arrive sets the word."""
    pair = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    num_tokens = tl.load(counts_P + pair).to(tl.int64)
    if (tl.load(gate) == 0) & (num_tokens > 0):
        slot = tl.load(slots_P + pair)
        words_at = words_PS + pair * num_slots + slot
        word = next_word(tl.load(words_at), REQUEST)
        slot_at = request_slot_at(pairs_PC, pair, slot)
        hidden_at = slot_at + of_pair(pairs_PC, pair, HIDDEN_OFFSET)
        scales_at = slot_at + of_pair(pairs_PC, pair, SCALES_OFFSET)
        for i in range(block, num_tokens, tl.num_programs(1)):
            token = tl.load(tokens_PT + pair * max_tokens + i).to(tl.int64)
            to = hidden_at + i * (UNITS * UNIT_BYTES)
            copy_units(x_NU + token * UNITS, to, UNITS, ALIGNED, BLOCK)
            if scales_Nd is not None:
                to = scales_at + i * (SCALES * 4)
                copy_units(scales_Nd + token * SCALES, to, SCALES, SCALES_ALIGNED, SCALES_BLOCK)
        if block == 0:
            first = pair * max_tokens * TOP_K
            weights_at = slot_at + of_pair(pairs_PC, pair, WEIGHTS_OFFSET)
            copy_units(ids_PTK + first, slot_at + BEHIND_HEADER, num_tokens * TOP_K, 16, BLOCK)
            copy_units(weights_PTK + first, weights_at, num_tokens * TOP_K, 16, BLOCK)
            store_8(slot_at + REQUEST_INSTANCE, of_pair(pairs_PC, pair, INSTANCE))
            store_8(slot_at + REQUEST_EPOCH, of_pair(pairs_PC, pair, EPOCH))
            store_8(slot_at + REQUEST_SEQUENCE, sequence_of(word))
            store_8(slot_at + REQUEST_VERSION, tl.load(version))
            store_8(slot_at + REQUEST_BUDGET, budget_us)
            store_4(slot_at + REQUEST_LAYER, layer)
            store_4(slot_at + REQUEST_TOKENS, num_tokens)
            store_4(slot_at + REQUEST_FLAGS, 0)
        if arrive(arrivals_P + pair):
            tl.store(words_at, word)
            store_word(word_at(pairs_PC, pair, slot, REQUESTS), word)


_op = define_op(
    "write_requests(Tensor pairs_PC, Tensor slots_P, Tensor(a!) words_PS, Tensor counts_P, "
    "Tensor tokens_PT, Tensor ids_PTK, Tensor weights_PTK, Tensor x_ND, Tensor? scales_Nd, "
    "Tensor gate, Tensor(b!) arrivals_P, Tensor version, int layer, int budget_us, int blocks) "
    "-> ()",
    kernel=launch,
    twin=write_requests_ref,
    fake=lambda *_: None,
)
