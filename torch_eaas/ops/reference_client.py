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


def wait_words_ref(
    pairs_PC: Tensor,
    slots_P: Tensor,
    words_PS: Tensor,
    counts_P: Tensor,
    gate: Tensor,
    abort: Tensor,
    timeout_us: int,
    looks: int,
    for_free: bool,
) -> tuple[Tensor, Tensor]:
    """Define ``signal.wait_replies`` and ``wait_free``; the waits begin together."""
    waited_P = torch.zeros_like(counts_P)
    replies_PF = pairs_PC.new_zeros((len(pairs_PC), len(REPLY_FIELDS)))
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
        if waited == Waited.ARRIVED and not for_free:
            fields = REPLY_HEADER.unpack(pair.slot(Column.REPLIES, slot, 0, REPLY_HEADER.size))
            replies_PF[p] = torch.tensor([signed(field) for field in fields])
            if replies_PF[p, :2].tolist() != [pair[Column.INSTANCE], pair[Column.EPOCH]]:
                waited = Waited.STRANGE
            elif fields[4] != Status.OK:
                waited = Waited.REFUSED
        if waited != Waited.ARRIVED:
            abort.fill_(1)
        waited_P[p] = waited
    return waited_P, replies_PF


def close_gate_ref(abort: Tensor, gate: Tensor) -> None:
    """Define ``signal.close_gate``."""
    gate.copy_(abort)


def write_requests_ref(
    pairs_PC: Tensor,
    slots_P: Tensor,
    words_PS: Tensor,
    counts_P: Tensor,
    tokens_PT: Tensor,
    ids_PTK: Tensor,
    weights_PTK: Tensor,
    x_ND: Tensor,
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
        parts = (
            (HEADER_BYTES, ids_PTK[p, :count]),
            (pair[Column.WEIGHTS_OFFSET], weights_PTK[p, :count]),
            (pair[Column.HIDDEN_OFFSET], x_ND[tokens_PT[p, :count].long()]),
        )
        for offset, part in parts:
            copy_bits(part, pair.slot(Column.REQUESTS, slot, offset, part.nbytes))
        header = pair.slot(Column.REQUESTS, slot, 0, REQUEST_HEADER.size)
        ours = unsigned(pair[Column.INSTANCE]), unsigned(pair[Column.EPOCH]), word >> 8
        REQUEST_HEADER.pack_into(header, 0, *ours, int(version), budget_us, layer, count, 0)
        words_PS[p, slot] = signed(word)
        pair.word(Column.REQUESTS, slot).value = word
