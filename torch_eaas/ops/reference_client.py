"""The plain twins of the ops of a client's data path, built on the protocol's own rules.

Shape suffixes: see ``pair_table``.
"""

from __future__ import annotations

import itertools
import time
from enum import IntEnum

import torch
from torch import Tensor

from torch_eaas.ops.pair_memory import PairMemory, copy_bits
from torch_eaas.ops.pair_table import Column, signed, unsigned
from torch_eaas.protocol.layout import (
    HEADER_BYTES,
    REPLY_FIELDS,
    REPLY_HEADER,
    REQUEST_HEADER,
    Status,
)
from torch_eaas.protocol.words import REQUEST, is_free, is_mine, next_word

MAX_TEXT = 4096
"""Most bytes of an error's text that a client reads."""

_PAUSE_S = 2e-5
"""Between two looks at a word on a CPU."""


class Waited(IntEnum):
    """What became of one wait."""

    NOTHING = 0
    """Nothing was asked of this pair, or the stage's gate was closed."""
    ARRIVED = 1
    TIMED_OUT = 2
    """The word had not come at the deadline."""
    ABORTED = 3
    """The word had not come when another wait of the step gave up."""
    REFUSED = 4
    """An answer has come, and it is an error."""
    STRANGE = 5
    """An answer has come whose instance or epoch is not this window's."""


class Outcome(IntEnum):
    """What a row of outcomes says of a pair's last wait, each 8 bytes."""

    WAITED = 0
    """A ``Waited``."""
    LAYER = 1
    INSTANCE = 2
    """From here on the answer's header, in the order of ``REPLY_FIELDS``; 0 where none came."""
    EPOCH = 3
    SEQUENCE = 4
    VERSION = 5
    STATUS = 6
    SIZE = 7
    QUEUE_US = 8
    EXPERTS_US = 9


WAIT_FAILED = 1
"""An abort word that a wait has set; the outcomes say which."""


def missing_word(layer: int, expert: int) -> int:
    """Return the abort word of a step that found nobody to ask for an expert.

    Example:
        Layer 1's expert 5 makes it ``2**32 + 7``.
    """
    return (layer << 32 | expert) + WAIT_FAILED + 1


def missing_expert(abort: int) -> tuple[int, int] | None:
    """Return layer and expert of such an abort word; None for any other."""
    return divmod(abort - WAIT_FAILED - 1, 1 << 32) if abort > WAIT_FAILED else None


def wait_words_ref(
    pairs_PC: Tensor,
    slots_P: Tensor,
    words_PS: Tensor,
    counts_P: Tensor,
    gate: Tensor,
    arrivals_P: Tensor,
    abort: Tensor,
    outcomes_PO: Tensor,
    layer: int,
    timeout_us: int,
    looks: int,
    for_free: bool,
) -> None:
    """Define ``signal.wait_replies`` and ``wait_free``; here one pair waits after the other."""
    deadline = time.monotonic() + timeout_us / 1e6
    for p in range(len(pairs_PC)):
        if gate.item() or counts_P[p] <= 0:
            continue
        pair, slot = PairMemory(pairs_PC, p), int(slots_P[p])
        request_word = unsigned(int(words_PS[p, slot]))
        waited = Waited.NOTHING
        for look in itertools.count(1):
            word = pair.word(Column.REPLIES, slot).value
            if is_free(request_word, word) if for_free else is_mine(word, request_word):
                waited = Waited.ARRIVED
            elif abort.item():
                waited = Waited.ABORTED
            elif look >= looks or time.monotonic() > deadline:
                waited = Waited.TIMED_OUT
            if waited:
                break
            # whoever answers may be a thread of this process, or share this core
            time.sleep(_PAUSE_S)
        if waited == Waited.ARRIVED and for_free:
            continue
        header = [0] * len(REPLY_FIELDS)
        if waited == Waited.ARRIVED:
            fields = REPLY_HEADER.unpack(pair.slot(Column.REPLIES, slot, 0, REPLY_HEADER.size))
            header = [signed(field) for field in fields]
            if header[:2] != [pair[Column.INSTANCE], pair[Column.EPOCH]]:
                waited = Waited.STRANGE
            elif fields[4] != Status.OK:
                waited = Waited.REFUSED
        if waited != Waited.ARRIVED:
            set_abort_ref(abort, WAIT_FAILED)
        outcomes_PO[p] = torch.tensor([waited, layer, *header])
    gate.copy_(abort)


def set_abort_ref(abort: Tensor, word: int) -> None:
    """Set the step's abort word unless another failure of the step has."""
    if not abort.item():
        abort.fill_(word)


def write_requests_ref(
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
    """Define ``write_requests.write_requests``."""
    for p, count in enumerate(counts_P.tolist()):
        if gate.item() or count <= 0:
            continue
        pair, slot = PairMemory(pairs_PC, p), int(slots_P[p])
        word = next_word(unsigned(int(words_PS[p, slot])), REQUEST)
        tokens_T = tokens_PT[p, :count].long()
        parts = [
            (HEADER_BYTES, ids_PTK[p, :count]),
            (pair[Column.WEIGHTS_OFFSET], weights_PTK[p, :count]),
            (pair[Column.HIDDEN_OFFSET], x_ND[tokens_T]),
        ]
        if scales_Nd is not None:
            parts.append((pair[Column.SCALES_OFFSET], scales_Nd[tokens_T]))
        for offset, part in parts:
            copy_bits(part, pair.slot(Column.REQUESTS, slot, offset, part.nbytes))
        header = pair.slot(Column.REQUESTS, slot, 0, REQUEST_HEADER.size)
        ours = unsigned(pair[Column.INSTANCE]), unsigned(pair[Column.EPOCH]), word >> 8
        REQUEST_HEADER.pack_into(header, 0, *ours, int(version), budget_us, layer, count, 0)
        words_PS[p, slot] = signed(word)
        pair.word(Column.REQUESTS, slot).value = word


def share_tokens_ref(
    ids_TK: Tensor, weights_TK: Tensor, pairs_E: Tensor, abort: Tensor, num_pairs: int, layer: int
) -> tuple[Tensor, ...]:
    """Define ``share_tokens.share_tokens``."""
    num_tokens, top_k = ids_TK.shape
    is_expert_TK = (ids_TK >= 0) & (ids_TK < len(pairs_E))
    pairs_TK = torch.full_like(ids_TK, -1)
    pairs_TK[is_expert_TK] = pairs_E[ids_TK[is_expert_TK].long()]
    # an id beyond the experts is nobody's either, but for their number, which means none
    is_missing_TK = (ids_TK >= 0) & (ids_TK != len(pairs_E)) & (pairs_TK < 0)
    if is_missing_TK.any():
        set_abort_ref(abort, missing_word(layer, int(ids_TK[is_missing_TK].max())))
    counts_P = ids_TK.new_zeros(num_pairs)
    tokens_PT = ids_TK.new_full((num_pairs, num_tokens), -1)
    ids_PTK = ids_TK.new_full((num_pairs, num_tokens, top_k), -1)
    weights_PTK = weights_TK.new_zeros((num_pairs, num_tokens, top_k))
    places_PT = torch.full_like(tokens_PT, -1)
    for p in range(num_pairs):
        is_mine_TK = pairs_TK == p
        tokens = is_mine_TK.any(1).nonzero().flatten()
        count = len(tokens)
        counts_P[p] = count
        tokens_PT[p, :count] = tokens
        ids_PTK[p, :count] = torch.where(is_mine_TK, ids_TK, -1)[tokens]
        weights_PTK[p, :count] = weights_TK[tokens]
        places_PT[p, tokens] = torch.arange(count, dtype=ids_TK.dtype)
    return counts_P, tokens_PT, ids_PTK, weights_PTK, places_PT


def add_replies_ref(
    pairs_PC: Tensor,
    slots_P: Tensor,
    places_PT: Tensor,
    gate: Tensor,
    add_TD: Tensor,
    exact_ids_TK: Tensor | None,
    pairs_E: Tensor | None,
    is_bf16: bool,
) -> Tensor:
    """Define ``add_replies.add_replies``."""
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    num_tokens, hidden = add_TD.shape
    total_TD = torch.zeros((num_tokens, hidden))

    def row_of(pair: int, row: int) -> Tensor:
        num_bytes = hidden * dtype.itemsize
        at = HEADER_BYTES + row * num_bytes
        memory = PairMemory(pairs_PC, pair).slot(Column.REPLIES, int(slots_P[pair]), at, num_bytes)
        return torch.frombuffer(bytearray(memory), dtype=dtype).float()

    if not gate.item():
        for token in range(num_tokens):
            if exact_ids_TK is None or pairs_E is None:
                for pair, place in enumerate(places_PT[:, token].tolist()):
                    if place >= 0:
                        total_TD[token] += row_of(pair, place)
                continue
            for k, expert in enumerate(exact_ids_TK[token].tolist()):
                pair = int(pairs_E[expert]) if 0 <= expert < len(pairs_E) else -1
                if pair >= 0:
                    row = int(places_PT[pair, token]) * exact_ids_TK.shape[1] + k
                    total_TD[token] += row_of(pair, row)
    return (total_TD + add_TD.float()).to(add_TD.dtype)


def choose_replicas_ref(ids_TK: Tensor, holders_EH: Tensor, num_pairs: int) -> Tensor:
    """Define ``choose_replicas.choose_replicas``."""
    present = set(ids_TK.flatten().tolist())
    loads = [0] * num_pairs
    pairs = []
    for expert, row in enumerate(holders_EH.tolist()):
        holders = [pair for pair in row if pair >= 0] or [-1]
        pair = min(holders, key=loads.__getitem__) if expert in present else holders[0]
        if expert in present and pair >= 0:
            loads[pair] += 1
        pairs.append(pair)
    return torch.tensor(pairs, dtype=torch.int32)


def read_text_ref(pairs_PC: Tensor, slots_P: Tensor, pair: int, size: int) -> Tensor:
    """Define ``read_text.read_text``."""
    memory = PairMemory(pairs_PC, pair)
    room = memory[Column.REPLY_SLOT_BYTES] - HEADER_BYTES
    count = max(0, min(size, room, MAX_TEXT))
    text = memory.slot(Column.REPLIES, int(slots_P[pair]), HEADER_BYTES, count)
    return torch.tensor(list(text) + [0] * (MAX_TEXT - count), dtype=torch.uint8)
