"""The server's scan on the GPU: which slots of which clients hold a request that nobody took.

Shape suffixes: see ``pair_table``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.errors import ConfigError
from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.pair_table import ServerTables
from torch_eaas.ops.reference_server import scan_slots_ref
from torch_eaas.ops.windows import BYTES_A_WORD, COLUMNS, REQUESTS, SLOTS
from torch_eaas.ops.words import is_newer

MAX_SCANNED = 8192
"""Slots of all pairs that one block can keep in its registers."""


def scan_slots(tables: ServerTables, now: Tensor, max_requests: int) -> tuple[Tensor, Tensor]:
    """List the slots that hold a request: one of each client in turn, then the second of each.

    A request's budget counts from the scan before the one that saw its word. A slot stays in the
    list until ``read_requests`` takes it.

    Args:
        tables: The server's pairs; their books are brought up to date.
        now: The clock in us, ``(1,)`` int64.
        max_requests: R, the longest list.

    Returns:
        The slots, ``(R,)`` int32, each as ``pair * S + slot``, filled up with -1, and their number,
        ``(1,)`` int32.

    Raises:
        ConfigError: There are more than ``MAX_SCANNED`` slots.

    Example:
        With 4 slots a pair, pair 0 has requests in slots 1 and 2, pair 2 in slot 3, and it is
        pair 2's turn: ``[11, 1, 2, -1]`` and ``[3]``.
    """
    check_tensor("now", now, (torch.int64,), 1)
    check_at_least("max_requests", max_requests, 1)
    _, pairs, slots = tables.book_3PS.shape
    lanes = triton.next_power_of_2(pairs) * triton.next_power_of_2(slots)
    if lanes > MAX_SCANNED:
        raise ConfigError(
            f"a scan covers at most {MAX_SCANNED} slots, rounded up to powers of two, got {pairs} "
            f"pairs of {slots}; make room for fewer pairs or slots"
        )
    ready_R, num_ready = _op(
        tables.pairs_PC, tables.book_3PS, tables.scanned_P, tables.turn, now, max_requests
    )
    return ready_R, num_ready


def launch(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    scanned_P: Tensor,
    turn: Tensor,
    now: Tensor,
    max_requests: int,
) -> tuple[Tensor, Tensor]:
    """Run the kernel: one block, so that the list needs no second launch."""
    ready_R, num_ready = _fake(pairs_PC, book_3PS, scanned_P, turn, now, max_requests)
    _, pairs, slots = book_3PS.shape
    with on_device(pairs_PC):
        _scan_kernel[(1,)](
            pairs_PC,
            book_3PS,
            scanned_P,
            turn,
            now,
            ready_R,
            num_ready,
            pairs,
            slots,
            max_requests,
            PAIRS=triton.next_power_of_2(pairs),
            SLOTS_A_PAIR=triton.next_power_of_2(slots),
            LONGEST=triton.next_power_of_2(max_requests),
        )
    return ready_R, num_ready


def _fake(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    scanned_P: Tensor,
    turn: Tensor,
    now: Tensor,
    max_requests: int,
) -> tuple[Tensor, Tensor]:
    return (
        pairs_PC.new_empty(max_requests, dtype=torch.int32),
        pairs_PC.new_empty(1, dtype=torch.int32),
    )


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "max_requests"])
def _scan_kernel(
    pairs_PC: tl.tensor,
    book_3PS: tl.tensor,
    scanned_P: tl.tensor,
    turn: tl.tensor,
    now: tl.tensor,
    ready_R: tl.tensor,
    num_ready: tl.tensor,
    num_pairs: tl.tensor,
    num_slots: tl.tensor,
    max_requests: tl.tensor,
    PAIRS: tl.constexpr,
    SLOTS_A_PAIR: tl.constexpr,
    LONGEST: tl.constexpr,
) -> None:
    """Look at every word once and write the list, round by round: each client's k-th request.

    The words are loaded without order here: who reads what a word announces acquires it anew.
    """
    lane = tl.arange(0, PAIRS)
    pair = ((lane + tl.load(turn)) % num_pairs).to(tl.int64)
    is_pair = lane < num_pairs
    window = tl.load(pairs_PC + pair * COLUMNS + REQUESTS, mask=is_pair, other=0)
    slots = tl.load(pairs_PC + pair * COLUMNS + SLOTS, mask=is_pair, other=0)
    is_open = is_pair & (window != 0)
    slot = tl.arange(0, SLOTS_A_PAIR)[None, :].to(tl.int64)
    is_slot = is_open[:, None] & (slot < slots[:, None])

    at = (window[:, None] + slot * BYTES_A_WORD).to(tl.pointer_type(tl.int64))
    word = tl.load(at, mask=is_slot, other=0, volatile=True)
    seen_PS = book_3PS + pair[:, None] * num_slots + slot
    since_PS = seen_PS + num_pairs * num_slots
    taken_PS = since_PS + num_pairs * num_slots
    seen = tl.load(seen_PS, mask=is_slot, other=0)
    taken = tl.load(taken_PS, mask=is_slot, other=0)
    # several threads may load the same word, and not all of them may find it new
    is_new = is_newer(word, seen) & is_slot
    scanned = tl.load(scanned_P + pair, mask=is_open, other=0)
    tl.store(seen_PS, word, mask=is_new)
    tl.store(since_PS, tl.broadcast_to(scanned[:, None], word.shape), mask=is_new)
    tl.store(scanned_P + pair, tl.broadcast_to(tl.load(now), pair.shape), mask=is_open)
    # from here on all threads know the same
    tl.debug_barrier()
    seen = tl.load(seen_PS, mask=is_slot, other=0)
    is_ready = (is_newer(seen, taken) & is_slot).to(tl.int32)
    rank = tl.cumsum(is_ready, axis=1) - is_ready
    count = tl.sum(is_ready, axis=1)
    listed = 0
    for k in range(num_slots):
        has_one = (count > k).to(tl.int32)
        chosen = (is_ready > 0) & (rank == k)
        entry = (pair * num_slots + tl.sum(tl.where(chosen, slot, 0), axis=1)).to(tl.int32)
        place = listed + tl.cumsum(has_one, axis=0) - has_one
        tl.store(ready_R + place, entry, mask=(has_one > 0) & (place < max_requests))
        listed += tl.sum(has_one, axis=0)
    place = tl.arange(0, LONGEST)
    rest = (place >= listed) & (place < max_requests)
    tl.store(ready_R + place, tl.full((LONGEST,), -1, tl.int32), mask=rest)
    tl.store(num_ready, tl.minimum(listed, max_requests))
    # whoever needs the turn has read it
    tl.debug_barrier()
    tl.store(turn, tl.load(turn) + 1)


_op = define_op(
    "scan_slots(Tensor pairs_PC, Tensor(a!) book_3PS, Tensor(b!) scanned_P, Tensor(c!) turn, "
    "Tensor now, int max_requests) -> (Tensor, Tensor)",
    kernel=launch,
    twin=scan_slots_ref,
    fake=_fake,
)
