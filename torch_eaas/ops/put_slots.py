"""Staged requests and replies are put into the peer's windows: NVSHMEM, one put a slot.

One request is one put whose signal is the word: separate puts may take different queue pairs, and
a word that travels alone could overtake its payload. What a slot uses is one contiguous piece, so
its length follows from the header that was staged. A slot's staging is free again when the answer
has come, and that is when the protocol frees the slot.

Linking NVSHMEM's bitcode takes a kernel 10 to 30 s (``put_linking``), so both ends launch the same
one.

Shape suffixes: see ``put_table``; N entries, one a pair or one a request.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.nvshmem_device import LIBRARY, SIGNAL_SET, put_signal
from torch_eaas.ops.pair_table import ClientTables, ServerTables
from torch_eaas.ops.put_table import PutColumn
from torch_eaas.ops.reference_puts import put_replies_ref, put_requests_ref
from torch_eaas.ops.windows import (
    BEHIND_HEADER,
    HIDDEN_OFFSET,
    REPLIES,
    REPLY_SIZE,
    REPLY_STATUS,
    REQUEST_TOKENS,
    REQUESTS,
    copy_units,
    load_4,
    load_8,
    of_pair,
    reply_slot_at,
    request_slot_at,
    word_at,
)
from torch_eaas.ops.words import store_word
from torch_eaas.protocol.layout import Status

_BLOCK = 1024
_COLUMNS = tl.constexpr(len(PutColumn))
_WINDOW = tl.constexpr(int(PutColumn.WINDOW))
_PE = tl.constexpr(int(PutColumn.PE))
_TOKEN_BYTES = tl.constexpr(int(PutColumn.TOKEN_BYTES))
_OK = tl.constexpr(int(Status.OK))

_POINTERS = ["pairs_PC", "puts_PQ", "chosen_N", "places_N", "gate"]


def put_requests(
    tables: ClientTables, puts_PQ: Tensor, counts_P: Tensor, gate: Tensor, *, bitcode: str
) -> None:
    """Send the requests that ``write_requests`` has staged, all in one launch.

    Args:
        tables: The client's pairs; their request windows are staging where they have a row here.
        puts_PQ: The table of puts, ``(P, Q)`` int64.
        counts_P: Tokens of each pair's request, ``(P,)`` int32; 0 makes none.
        gate: The gate that ``write_requests`` obeyed, ``(1,)`` int64.
        bitcode: NVSHMEM's device library; empty where stores reach what the table names.

    Example:
        Pair 0 is reached by stores, its row is zeros, and it is skipped; pair 1 has staged a
        request of 2 tokens in slot 3: one put of header, ids, weights and 2 hidden states.
    """
    check_tensor("puts_PQ", puts_PQ, (torch.int64,), 2)
    check_tensor("counts_P", counts_P, (torch.int32,), 1)
    check_tensor("gate", gate, (torch.int64,), 1)
    _op(tables.pairs_PC, puts_PQ, counts_P, tables.slots_P, gate, bitcode)


def put_replies(
    tables: ServerTables,
    puts_PQ: Tensor,
    statuses_R: Tensor,
    ready_R: Tensor,
    gate: Tensor,
    *,
    bitcode: str,
) -> None:
    """Send the replies that ``write_replies`` has staged, all in one launch.

    Args:
        tables: The server's pairs; their reply windows are staging where they have a row here.
        puts_PQ: The table of puts, ``(P, Q)`` int64.
        statuses_R: What ``write_replies`` was given: -1 where nothing was written.
        ready_R: The slots, as it was given them.
        gate: If it is not 0, nothing is sent, ``(1,)`` int64.
        bitcode: NVSHMEM's device library; empty where stores reach what the table names.

    Example:
        An error of 20 bytes of text is one put of 148 bytes: the header's 128, and the text.
    """
    check_tensor("puts_PQ", puts_PQ, (torch.int64,), 2)
    check_tensor("statuses_R", statuses_R, (torch.int32,), 1)
    check_tensor("ready_R", ready_R, (torch.int32,), 1)
    check_tensor("gate", gate, (torch.int64,), 1)
    slots_a_pair = tables.book_3PS.shape[2]
    _reply_op(tables.pairs_PC, puts_PQ, statuses_R, ready_R, gate, slots_a_pair, bitcode)


def launch(
    pairs_PC: Tensor,
    puts_PQ: Tensor,
    counts_P: Tensor,
    slots_P: Tensor,
    gate: Tensor,
    bitcode: str,
) -> None:
    """Run the kernel for a client: one program a pair."""
    # a slot's number is the low half of its int64
    places_N = slots_P.view(torch.int32)
    _launch(pairs_PC, puts_PQ, counts_P, places_N, gate, 1, bitcode, for_requests=True)


def launch_replies(
    pairs_PC: Tensor,
    puts_PQ: Tensor,
    statuses_R: Tensor,
    ready_R: Tensor,
    gate: Tensor,
    slots_a_pair: int,
    bitcode: str,
) -> None:
    """Run the kernel for a server: one program a request."""
    _launch(pairs_PC, puts_PQ, statuses_R, ready_R, gate, slots_a_pair, bitcode, for_requests=False)


def options_of(bitcode: str) -> dict[str, Any]:
    """Return what the kernel is launched with beside its arguments."""
    options: dict[str, Any] = {"BY_NVSHMEM": bool(bitcode), "BLOCK": _BLOCK, "num_warps": 8}
    return {**options, "extern_libs": {LIBRARY: bitcode}} if bitcode else options


def _launch(
    pairs_PC: Tensor,
    puts_PQ: Tensor,
    chosen_N: Tensor,
    places_N: Tensor,
    gate: Tensor,
    slots_a_pair: int,
    bitcode: str,
    *,
    for_requests: bool,
) -> None:
    with on_device(pairs_PC):
        put_kernel[(len(chosen_N),)](
            pairs_PC,
            puts_PQ,
            chosen_N,
            places_N,
            gate,
            slots_a_pair,
            int(for_requests),
            **options_of(bitcode),
        )


@triton.jit
def _copy_and_store_word(
    to: tl.tensor,
    source: tl.tensor,
    num_bytes: tl.tensor,
    word_at: tl.tensor,
    word: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Do with stores what ``put_signal`` does: the bytes, then the word."""
    copy_units(source.to(tl.pointer_type(tl.uint8)), to, num_bytes, 16, BLOCK)
    store_word(word_at, word)


# one module whatever it is given: NVSHMEM is told of it once
@triton.jit(
    do_not_specialize=["slots_a_pair", "for_requests"], do_not_specialize_on_alignment=_POINTERS
)
def put_kernel(
    pairs_PC: tl.tensor,
    puts_PQ: tl.tensor,
    chosen_N: tl.tensor,
    places_N: tl.tensor,
    gate: tl.tensor,
    slots_a_pair: tl.tensor,
    for_requests: tl.tensor,
    BY_NVSHMEM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Put one slot: an entry is a pair's count and slot, or a request's status and place."""
    i = tl.program_id(0).to(tl.int64)
    place = tl.load(places_N + i * (1 + for_requests)).to(tl.int64)
    # a count of at least 1, or a status of at least 0
    is_chosen = tl.load(chosen_N + i) >= for_requests
    if is_chosen & (tl.load(gate) == 0):
        if for_requests != 0:
            pair = i
            slot = place
        else:
            pair = place // slots_a_pair
            slot = place % slots_a_pair
        put = puts_PQ + pair * _COLUMNS
        window = tl.load(put + _WINDOW)
        token_bytes = tl.load(put + _TOKEN_BYTES)
        if window != 0:
            if for_requests != 0:
                slot_at = request_slot_at(pairs_PC, pair, slot)
                staged_at = word_at(pairs_PC, pair, slot, REQUESTS)
                away = window - of_pair(pairs_PC, pair, REQUESTS)
                num_tokens = load_4(slot_at + REQUEST_TOKENS)
                num_bytes = of_pair(pairs_PC, pair, HIDDEN_OFFSET) + num_tokens * token_bytes
            else:
                slot_at = reply_slot_at(pairs_PC, pair, slot)
                staged_at = word_at(pairs_PC, pair, slot, REPLIES)
                away = window - of_pair(pairs_PC, pair, REPLIES)
                is_ok = load_4(slot_at + REPLY_STATUS) == _OK
                size = load_4(slot_at + REPLY_SIZE)
                num_bytes = BEHIND_HEADER + size * tl.where(is_ok, token_bytes, 1)
            word = load_8(staged_at)
            if BY_NVSHMEM:
                pe = tl.load(put + _PE).to(tl.int32)
                put_signal(
                    slot_at + away,
                    slot_at,
                    num_bytes,
                    staged_at + away,
                    word,
                    tl.full((), SIGNAL_SET, tl.int32),
                    pe,
                )
            else:
                _copy_and_store_word(
                    slot_at + away, slot_at, num_bytes, staged_at + away, word, BLOCK
                )


# the gate stands for the windows, which no op takes: an op without effects would be dropped
_op = define_op(
    "put_requests(Tensor pairs_PC, Tensor puts_PQ, Tensor counts_P, Tensor slots_P, "
    "Tensor(a!) gate, str bitcode) -> ()",
    kernel=launch,
    twin=put_requests_ref,
    fake=lambda *_: None,
)

_reply_op = define_op(
    "put_replies(Tensor pairs_PC, Tensor puts_PQ, Tensor statuses_R, Tensor ready_R, "
    "Tensor(a!) gate, int slots_a_pair, str bitcode) -> ()",
    kernel=launch_replies,
    twin=put_replies_ref,
    fake=lambda *_: None,
)
