"""The plain twins of the ops that put staged requests and replies into a peer's windows.

Shape suffixes: see ``put_table``.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from torch_eaas.ops.pair_memory import PairMemory
from torch_eaas.ops.pair_table import Column
from torch_eaas.ops.put_table import PutColumn
from torch_eaas.ops.reference_server import NO_REQUEST
from torch_eaas.protocol.layout import (
    HEADER_BYTES,
    REPLY_HEADER,
    REQUEST_HEADER,
    WORD_BYTES,
    Status,
)


def put_requests_ref(
    pairs_PC: Tensor,
    puts_PQ: Tensor,
    counts_P: Tensor,
    slots_P: Tensor,
    gate: Tensor,
    bitcode: str,
) -> None:
    """Define ``put_slots.put_requests``; a peer's window is one that this process has mapped."""
    for p, count in enumerate(counts_P.tolist()):
        if gate.item() or count <= 0:
            continue
        pair, slot = PairMemory(pairs_PC, p), int(slots_P[p])
        header = pair.slot(Column.REQUESTS, slot, 0, REQUEST_HEADER.size)
        tokens_bytes = REQUEST_HEADER.unpack(header)[6] * int(puts_PQ[p, PutColumn.TOKEN_BYTES])
        num_bytes = pair[Column.HIDDEN_OFFSET] + tokens_bytes
        _put(pair, puts_PQ[p], Column.REQUESTS, slot, num_bytes)


def put_replies_ref(
    pairs_PC: Tensor,
    puts_PQ: Tensor,
    statuses_R: Tensor,
    ready_R: Tensor,
    gate: Tensor,
    slots_a_pair: int,
    bitcode: str,
) -> None:
    """Define ``put_slots.put_replies``."""
    for r, given in enumerate(statuses_R.tolist()):
        if gate.item() or given == NO_REQUEST:
            continue
        p, slot = divmod(int(ready_R[r]), slots_a_pair)
        pair = PairMemory(pairs_PC, p)
        header = pair.slot(Column.REPLIES, slot, 0, REPLY_HEADER.size)
        status, size = REPLY_HEADER.unpack(header)[4:6]
        unit = int(puts_PQ[p, PutColumn.TOKEN_BYTES]) if status == Status.OK else 1
        _put(pair, puts_PQ[p], Column.REPLIES, slot, HEADER_BYTES + size * unit)


def _put(pair: PairMemory, put_Q: Tensor, window: Column, slot: int, num_bytes: int) -> None:
    """Copy a staged slot's bytes, then its word, to the same place of the peer's window."""
    away = int(put_Q[PutColumn.WINDOW]) - pair[window]
    if int(put_Q[PutColumn.WINDOW]) == 0:
        return
    source = ctypes.addressof(ctypes.c_char.from_buffer(pair.slot(window, slot, 0, num_bytes)))
    ctypes.memmove(source + away, source, num_bytes)
    at = pair[window] + slot * WORD_BYTES
    ctypes.c_uint64.from_address(at + away).value = pair.word(window, slot).value
