"""Where a kernel finds the words, slots and header fields of a pair's windows.

Addresses come from the table of pairs, offsets from the protocol's field table.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.ops.pair_table import Column
from torch_eaas.protocol.layout import (
    HEADER_BYTES,
    REPLY_FIELDS,
    REQUEST_FIELDS,
    WORD_BYTES,
    field_offsets,
)

_UNITS = {4: torch.int32, 2: torch.int16, 1: torch.int8}

_REQUEST = field_offsets(REQUEST_FIELDS)
_REPLY = field_offsets(REPLY_FIELDS)

COLUMNS = tl.constexpr(len(Column))
REQUESTS = tl.constexpr(int(Column.REQUESTS))
REPLIES = tl.constexpr(int(Column.REPLIES))
INSTANCE = tl.constexpr(int(Column.INSTANCE))
EPOCH = tl.constexpr(int(Column.EPOCH))
SLOTS = tl.constexpr(int(Column.SLOTS))
MAX_TOKENS = tl.constexpr(int(Column.MAX_TOKENS))
WORDS_BYTES = tl.constexpr(int(Column.WORDS_BYTES))
REQUEST_SLOT_BYTES = tl.constexpr(int(Column.REQUEST_SLOT_BYTES))
REPLY_SLOT_BYTES = tl.constexpr(int(Column.REPLY_SLOT_BYTES))
WEIGHTS_OFFSET = tl.constexpr(int(Column.WEIGHTS_OFFSET))
HIDDEN_OFFSET = tl.constexpr(int(Column.HIDDEN_OFFSET))
SCALES_OFFSET = tl.constexpr(int(Column.SCALES_OFFSET))

BEHIND_HEADER = tl.constexpr(HEADER_BYTES)
"""Where a request's ids and a reply's rows begin within their slot."""
BYTES_A_WORD = tl.constexpr(WORD_BYTES)

REQUEST_INSTANCE = tl.constexpr(_REQUEST["instance"])
REQUEST_EPOCH = tl.constexpr(_REQUEST["epoch"])
REQUEST_SEQUENCE = tl.constexpr(_REQUEST["sequence"])
REQUEST_VERSION = tl.constexpr(_REQUEST["placement_version"])
REQUEST_BUDGET = tl.constexpr(_REQUEST["budget_us"])
REQUEST_LAYER = tl.constexpr(_REQUEST["layer"])
REQUEST_TOKENS = tl.constexpr(_REQUEST["num_tokens"])
REQUEST_FLAGS = tl.constexpr(_REQUEST["flags"])

REPLY_INSTANCE = tl.constexpr(_REPLY["instance"])
REPLY_EPOCH = tl.constexpr(_REPLY["epoch"])
REPLY_SEQUENCE = tl.constexpr(_REPLY["sequence"])
REPLY_VERSION = tl.constexpr(_REPLY["placement_version"])
REPLY_STATUS = tl.constexpr(_REPLY["status"])
REPLY_SIZE = tl.constexpr(_REPLY["size"])
REPLY_QUEUE = tl.constexpr(_REPLY["queue_us"])
REPLY_EXPERTS = tl.constexpr(_REPLY["experts_us"])


def units_of(rows: Tensor) -> Tensor:
    """Return rows ``(N, D)`` as the integers that copies are made of, ``(N, U)``."""
    return rows.view(_UNITS[math.gcd(rows.shape[-1] * rows.element_size(), 4)])


def alignment_of(rows_NU: Tensor) -> int:
    """Return what the address of every row in a slot is a multiple of, at most 16 bytes."""
    return math.gcd(rows_NU.shape[1] * rows_NU.element_size(), 16)


def scale_units(scales_Nd: Tensor | None) -> dict[str, int]:
    """Return what a kernel that copies tokens must know of their scales, if there are any."""
    if scales_Nd is None:
        return {"SCALES": 0, "SCALES_ALIGNED": 1, "SCALES_BLOCK": 1}
    return {
        "SCALES": scales_Nd.shape[1],
        "SCALES_ALIGNED": alignment_of(scales_Nd),
        "SCALES_BLOCK": triton.next_power_of_2(scales_Nd.shape[1]),
    }


@triton.jit
def of_pair(pairs_PC: tl.tensor, pair: tl.tensor, COLUMN: tl.constexpr) -> tl.tensor:
    """Return one column of a pair's row; ``pair`` may be a block of pairs."""
    return tl.load(pairs_PC + pair * COLUMNS + COLUMN)


@triton.jit
def word_at(
    pairs_PC: tl.tensor, pair: tl.tensor, slot: tl.tensor, WINDOW: tl.constexpr
) -> tl.tensor:
    """Return the address of a slot's word; WINDOW is REQUESTS or REPLIES."""
    return of_pair(pairs_PC, pair, WINDOW) + slot * BYTES_A_WORD


@triton.jit
def request_slot_at(pairs_PC: tl.tensor, pair: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """Return the address of a request slot, where its header begins."""
    start = of_pair(pairs_PC, pair, REQUESTS) + of_pair(pairs_PC, pair, WORDS_BYTES)
    return start + slot * of_pair(pairs_PC, pair, REQUEST_SLOT_BYTES)


@triton.jit
def reply_slot_at(pairs_PC: tl.tensor, pair: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """Return the address of a reply slot, where its header begins."""
    start = of_pair(pairs_PC, pair, REPLIES) + of_pair(pairs_PC, pair, WORDS_BYTES)
    return start + slot * of_pair(pairs_PC, pair, REPLY_SLOT_BYTES)


@triton.jit
def load_8(address: tl.tensor) -> tl.tensor:
    """Load a field of 8 bytes, once: a peer may change it at any time."""
    return tl.load(address.to(tl.pointer_type(tl.int64)), volatile=True)


@triton.jit
def load_4(address: tl.tensor) -> tl.tensor:
    """Load a field of 4 bytes, once, as a number of 0 to 2**32 - 1 in int64."""
    field = tl.load(address.to(tl.pointer_type(tl.int32)), volatile=True)
    return field.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def store_8(address: tl.tensor, number: tl.tensor) -> None:
    """Store a field of 8 bytes."""
    tl.store(address.to(tl.pointer_type(tl.int64)), number)


@triton.jit
def store_4(address: tl.tensor, number: tl.tensor) -> None:
    """Store a field of 4 bytes: the low half of an int64."""
    tl.store(address.to(tl.pointer_type(tl.int32)), number)


@triton.jit
def copy_units(
    source: tl.tensor, to: tl.tensor, count: tl.tensor, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Copy ``count`` units from a pointer to an address, bit by bit, with plain stores.

    ALIGNED is what the address is a multiple of: with 16 bytes a thread stores 16 at a time.
    """
    target = tl.multiple_of(to.to(source.dtype), ALIGNED)
    for start in range(0, count, BLOCK):
        unit = start + tl.arange(0, BLOCK)
        tl.store(
            target + unit, tl.load(source + unit, mask=unit < count, other=0), mask=unit < count
        )


@triton.jit
def arrive(counter: tl.tensor) -> tl.tensor:
    """Return whether this block is the last of its row of the grid: all others' stores are done.

    The last one puts the counter back to 0, so a whole stage leaves it as it was.
    """
    # the count is one thread's: the others' stores must come before it
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1
    if is_last:
        tl.store(counter, 0)
    return is_last
