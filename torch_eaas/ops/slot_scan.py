"""The server's scan on the GPU: which slots of which clients hold a request that nobody took.

Shape suffixes: see ``pair_table``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.errors import ConfigError
from torch_eaas.ops.clock import clock_ns
from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.pair_table import ServerTables
from torch_eaas.ops.reference_server import scan_slots_ref
from torch_eaas.ops.windows import (
    BYTES_A_WORD,
    COLUMNS,
    MAX_TOKENS,
    REQUEST_SLOT_BYTES,
    REQUEST_TOKENS,
    REQUESTS,
    SLOTS,
    WORDS_BYTES,
)
from torch_eaas.ops.words import is_newer

MAX_SCANNED = 8192
"""Slots of all pairs that one block can keep in its registers."""

UNLIMITED = (1 << 31) - 1


class Scanned(NamedTuple):
    """What a scan admits to the next batch: one entry a request, int32."""

    ready_R: Tensor
    """The slots, each as ``pair * S + slot``, filled up with -1."""
    tokens_R: Tensor
    """Tokens that each was admitted with, 0 for no request."""
    num_ready: Tensor
    """How many there are, ``(1,)`` int32."""
    ended: Tensor
    """The clock in us as the scan ended, ``(1,)`` int64: when it began, and how long it waited."""


def scan_slots(
    tables: ServerTables,
    now: Tensor,
    max_requests: int,
    *,
    max_tokens: int = UNLIMITED,
    wait_us: int = 0,
    looks: int = 1,
) -> Scanned:
    """List the slots that hold a request: one of each client in turn, then the second of each.

    Of that list it admits the first, and then as many as ``max_tokens`` allows. A slot stays in
    the list until ``read_requests`` takes it. A request's budget counts from the scan before the
    one that saw its word.

    Args:
        tables: The server's pairs; their books are brought up to date.
        now: The clock in us as the scan begins, ``(1,)`` int64.
        max_requests: R, the longest list.
        max_tokens: Most tokens of all, by the headers; what a header says beyond its slot's room
            counts as that room.
        wait_us: How long to look, if nothing is ready, by the GPU's timer; the interpreter has
            none.
        looks: How often to look at most: what ends the wait in the interpreter.

    Raises:
        ConfigError: There are more than ``MAX_SCANNED`` slots.

    Example:
        With 4 slots a pair, pair 0 has requests of 2 tokens in slots 1 and 2, pair 2 one of 3
        tokens in slot 3, and it is pair 2's turn: ``[11, 1, 2, -1]``, ``[3, 2, 2, 0]``,
        ``[3]`` and the time; with ``max_tokens=5`` ``[11, 1, -1, -1]``, ``[3, 2, 0, 0]``, ``[2]``.
    """
    check_tensor("now", now, (torch.int64,), 1)
    for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens)):
        check_at_least(name, value, 1)
    check_at_least("wait_us", wait_us, 0)
    check_at_least("looks", looks, 1)
    check_scanned(*tables.book_3PS.shape[1:])
    books = (tables.pairs_PC, tables.book_3PS, tables.scanned_P, tables.turn)
    return Scanned(*_op(*books, now, max_requests, max_tokens, wait_us, looks))


def check_scanned(pairs: int, slots: int) -> None:
    """Refuse more slots than a scan covers.

    Raises:
        ConfigError: There are more than ``MAX_SCANNED``, rounded up to powers of two.
    """
    lanes = triton.next_power_of_2(pairs) * triton.next_power_of_2(slots)
    if lanes > MAX_SCANNED:
        raise ConfigError(
            f"a scan covers at most {MAX_SCANNED} slots, rounded up to powers of two, got {pairs} "
            f"pairs of {slots}; make room for fewer pairs or slots"
        )


def launch(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    scanned_P: Tensor,
    turn: Tensor,
    now: Tensor,
    max_requests: int,
    max_tokens: int,
    wait_us: int,
    looks: int,
) -> tuple[Tensor, ...]:
    """Run the kernel: one block, so that the list needs no second launch."""
    outputs = _fake(pairs_PC, book_3PS, scanned_P, turn, now, max_requests)
    _, pairs, slots = book_3PS.shape
    with on_device(pairs_PC):
        _scan_kernel[(1,)](
            pairs_PC,
            book_3PS,
            scanned_P,
            turn,
            now,
            *outputs,
            pairs,
            slots,
            max_requests,
            max_tokens,
            wait_us * 1000,
            looks,
            PAIRS=triton.next_power_of_2(pairs),
            SLOTS_A_PAIR=triton.next_power_of_2(slots),
            LONGEST=triton.next_power_of_2(max_requests),
            HAS_TIMER=isinstance(_scan_kernel, triton.JITFunction),
        )
    return outputs


def _fake(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    scanned_P: Tensor,
    turn: Tensor,
    now: Tensor,
    max_requests: int,
    *_: object,
) -> tuple[Tensor, ...]:
    ready_R = pairs_PC.new_empty(max_requests, dtype=torch.int32)
    return ready_R, torch.empty_like(ready_R), ready_R.new_empty(1), torch.empty_like(now)


@triton.jit
def _look(at_PS: tl.tensor, is_slot: tl.tensor, seen: tl.tensor, taken: tl.tensor) -> tl.tensor:
    """Return 1 if any slot holds what nobody took, else 0."""
    # without order: who reads what a word announces acquires it anew
    word = tl.load(at_PS, mask=is_slot, other=0, volatile=True)
    is_ready = (is_newer(word, taken) | is_newer(seen, taken)) & is_slot
    return tl.max(tl.max(is_ready.to(tl.int32), axis=1), axis=0)


@triton.jit(
    do_not_specialize=[
        "num_pairs",
        "num_slots",
        "max_requests",
        "max_tokens",
        "wait_ns",
        "looks",
    ]
)
def _scan_kernel(
    pairs_PC: tl.tensor,
    book_3PS: tl.tensor,
    scanned_P: tl.tensor,
    turn: tl.tensor,
    now: tl.tensor,
    ready_R: tl.tensor,
    tokens_R: tl.tensor,
    num_ready: tl.tensor,
    ended: tl.tensor,
    num_pairs: tl.tensor,
    num_slots: tl.tensor,
    max_requests: tl.tensor,
    max_tokens: tl.tensor,
    wait_ns: tl.tensor,
    looks: tl.tensor,
    PAIRS: tl.constexpr,
    SLOTS_A_PAIR: tl.constexpr,
    LONGEST: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    """Look until a word is new, and write the list, round by round: each client's k-th request.

    The list's length is where the threads agree, meanwhile, whether to look again.
    """
    lane = tl.arange(0, PAIRS)
    first = (tl.load(turn) & 0x7FFFFFFF).to(tl.int32) % num_pairs
    pair = tl.where(lane < num_pairs - first, lane, lane - num_pairs) + first
    is_pair = lane < num_pairs
    row = pairs_PC + pair * COLUMNS
    window = tl.load(row + REQUESTS, mask=is_pair, other=0)
    slots = tl.load(row + SLOTS, mask=is_pair, other=0)
    is_open = is_pair & (window != 0)
    slot = tl.arange(0, SLOTS_A_PAIR)[None, :]
    is_slot = is_open[:, None] & (slot < slots[:, None])

    at_PS = (window[:, None] + slot * BYTES_A_WORD).to(tl.pointer_type(tl.int64))
    seen_PS = book_3PS + pair[:, None] * num_slots + slot
    since_PS = seen_PS + num_pairs * num_slots
    taken_PS = since_PS + num_pairs * num_slots
    seen = tl.load(seen_PS, mask=is_slot, other=0)
    taken = tl.load(taken_PS, mask=is_slot, other=0)
    start = clock_ns(HAS_TIMER)
    looked = 0
    waits = 1
    while waits != 0:
        looked += 1
        is_any = _look(at_PS, is_slot, seen, taken)
        is_late = (looked >= looks) | (clock_ns(HAS_TIMER) - start >= wait_ns)
        # threads may see other words and other times: one's decision is everybody's
        tl.store(num_ready, tl.where(is_late, 0, 1 - is_any))
        tl.debug_barrier()
        waits = tl.load(num_ready)
        tl.debug_barrier()

    # what one thread has seen, all of them see now
    word = tl.load(at_PS, mask=is_slot, other=0, volatile=True)
    # several threads may load the same word, and not all of them may find it new
    is_new = is_newer(word, seen) & is_slot
    scanned = tl.load(scanned_P + pair, mask=is_open, other=0)
    tl.store(seen_PS, word, mask=is_new)
    tl.store(since_PS, tl.broadcast_to(scanned[:, None], word.shape), mask=is_new)
    # one thread stores a pair's time, and others have loaded the last one
    tl.debug_barrier()
    tl.store(scanned_P + pair, tl.broadcast_to(tl.load(now), pair.shape), mask=is_open)
    # from here on all threads know the same
    tl.debug_barrier()
    seen = tl.load(seen_PS, mask=is_slot, other=0)
    is_ready = is_newer(seen, taken) & is_slot
    # loaded after the word, which is not acquired: a count that is too old costs a retry
    first = window + tl.load(row + WORDS_BYTES, mask=is_pair, other=0) + REQUEST_TOKENS
    stride = tl.load(row + REQUEST_SLOT_BYTES, mask=is_pair, other=0)
    tokens_at = (first[:, None] + slot * stride[:, None]).to(tl.pointer_type(tl.int32))
    room = tl.load(row + MAX_TOKENS, mask=is_pair, other=0)
    tokens = tl.load(tokens_at, mask=is_ready, other=0, volatile=True).to(tl.uint32, bitcast=True)
    tokens = tl.minimum(tokens, room[:, None].to(tl.uint32)).to(tl.int32)
    is_ready = is_ready.to(tl.int32)
    rank = tl.cumsum(is_ready, axis=1) - is_ready
    count = tl.sum(is_ready, axis=1)
    listed = 0
    before = 0
    admitted = 0
    for k in range(num_slots):
        has_one = (count > k).to(tl.int32)
        chosen = (is_ready > 0) & (rank == k)
        entry = pair * num_slots + tl.sum(tl.where(chosen, slot, 0), axis=1)
        own = tl.sum(tl.where(chosen, tokens, 0), axis=1)
        place = listed + tl.cumsum(has_one, axis=0) - has_one
        fits = (before + tl.cumsum(own, axis=0) <= max_tokens) | (place == 0)
        fits = fits & (has_one > 0) & (place < max_requests)
        tl.store(ready_R + place, entry, mask=fits)
        tl.store(tokens_R + place, own, mask=fits)
        admitted += tl.sum(fits.to(tl.int32), axis=0)
        listed += tl.sum(has_one, axis=0)
        before += tl.sum(own, axis=0)
    place = tl.arange(0, LONGEST)
    rest = (place >= admitted) & (place < max_requests)
    tl.store(ready_R + place, tl.full((LONGEST,), -1, tl.int32), mask=rest)
    tl.store(tokens_R + place, tl.zeros((LONGEST,), tl.int32), mask=rest)
    tl.store(num_ready, admitted)
    tl.store(ended, tl.load(now) + (clock_ns(HAS_TIMER) - start) // 1000)
    # whoever needs the turn has read it
    tl.debug_barrier()
    tl.store(turn, tl.load(turn) + 1)


_op = define_op(
    "scan_slots(Tensor pairs_PC, Tensor(a!) book_3PS, Tensor(b!) scanned_P, Tensor(c!) turn, "
    "Tensor now, int max_requests, int max_tokens, int wait_us, int looks) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    kernel=launch,
    twin=scan_slots_ref,
    fake=_fake,
)
