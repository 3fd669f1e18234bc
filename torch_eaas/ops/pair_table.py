"""The table of pairs in device memory: where a kernel finds each pair's windows.

One row a pair. The host writes rows between replays and a kernel reads its addresses here, so a
pair may come, go or get new windows under a captured graph. A row of zeros is free.

Shape suffixes, here and in all files about windows: P rows of pairs, C columns, S slots a pair, R
requests of one iteration, F fields of a header, T tokens, K experts per token, D hidden, d fp8
scales of a token, U units of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops.launching import check_tensor
from torch_eaas.protocol.layout import ALIGN, PairSpec


class Column(IntEnum):
    """What a row says, each 8 bytes."""

    REQUESTS = 0
    """Address of the request window; 0 in a free row."""
    REPLIES = 1
    """Address of the reply window."""
    INSTANCE = 2
    EPOCH = 3
    SLOTS = 4
    MAX_TOKENS = 5
    WORDS_BYTES = 6
    """Where slot 0 begins, in either window."""
    REQUEST_SLOT_BYTES = 7
    REPLY_SLOT_BYTES = 8
    WEIGHTS_OFFSET = 9
    """Where the router weights begin within a request slot; ids begin behind the header."""
    HIDDEN_OFFSET = 10
    SCALES_OFFSET = 11
    """Where fp8's scales begin; where there are none, what ``HIDDEN_OFFSET`` says."""


FREE_ROW = [0] * len(Column)


def pair_row(
    spec: PairSpec, *, requests: int, replies: int, instance: int, epoch: int
) -> list[int]:
    """Return a pair's row, to be copied into an int64 table ``(P, C)``.

    Args:
        spec: What was agreed.
        requests: Address of the request window, as this process (or GPU) sees it.
        replies: Address of the reply window.
        instance: The client's instance id.
        epoch: The number of the windows.

    Raises:
        ConfigError: An address is no multiple of 128, so a kernel's wide stores would fault.

    Example:
        The instance ``2**64 - 1`` stands there as ``-1``: 64 bits are 64 bits.
    """
    for name, address in (("requests", requests), ("replies", replies)):
        if address < 1 or address % ALIGN:
            raise ConfigError(
                f"{name} must be an address that is a multiple of {ALIGN}, got {address:#x}; "
                f"make each window an allocation of its own"
            )
    row = {
        Column.REQUESTS: requests,
        Column.REPLIES: replies,
        Column.INSTANCE: signed(instance),
        Column.EPOCH: signed(epoch),
        Column.SLOTS: spec.slots,
        Column.MAX_TOKENS: spec.max_tokens,
        Column.WORDS_BYTES: spec.words_bytes,
        Column.REQUEST_SLOT_BYTES: spec.request_slot_bytes,
        Column.REPLY_SLOT_BYTES: spec.reply_slot_bytes,
        Column.WEIGHTS_OFFSET: spec.weights_offset,
        Column.HIDDEN_OFFSET: spec.hidden_offset,
        Column.SCALES_OFFSET: spec.scales_offset,
    }
    return [row[column] for column in Column]


@dataclass(frozen=True, slots=True)
class ClientTables:
    """What a client's kernels know of its pairs; the host may change it between replays."""

    pairs_PC: Tensor
    """The pairs, int64."""
    slots_P: Tensor
    """The slot that the next request of each pair takes, int64."""
    words_PS: Tensor
    """The last request word of each slot, int64; kernels advance it."""

    def __post_init__(self) -> None:
        check_tensor("pairs_PC", self.pairs_PC, (torch.int64,), 2)
        check_tensor("slots_P", self.slots_P, (torch.int64,), 1)
        check_tensor("words_PS", self.words_PS, (torch.int64,), 2)

    @classmethod
    def empty(cls, pairs: int, slots: int, device: torch.device | str = "cpu") -> Self:
        """Return tables with room for so many pairs, none of which is open."""
        return cls(
            _zeros(device, pairs, len(Column)), _zeros(device, pairs), _zeros(device, pairs, slots)
        )


@dataclass(frozen=True, slots=True)
class ServerTables:
    """What a server's kernels know of its pairs.

    When the host writes a pair's row, it sets the pair's part of ``book_3PS`` to 0 and its entry of
    ``scanned_P`` to now.
    """

    pairs_PC: Tensor
    """The pairs, int64."""
    book_3PS: Tensor
    """Of each slot the word last seen, when its budget began to count (us), and the word last
    taken, int64."""
    scanned_P: Tensor
    """When each pair's words were last looked at, in us, int64."""
    turn: Tensor
    """Iterations so far, ``(1,)`` int64: the pair whose turn it is comes first."""

    def __post_init__(self) -> None:
        check_tensor("pairs_PC", self.pairs_PC, (torch.int64,), 2)
        check_tensor("book_3PS", self.book_3PS, (torch.int64,), 3)
        check_tensor("scanned_P", self.scanned_P, (torch.int64,), 1)
        check_tensor("turn", self.turn, (torch.int64,), 1)

    @classmethod
    def empty(cls, pairs: int, slots: int, device: torch.device | str = "cpu") -> Self:
        """Return tables with room for so many pairs, none of which is open."""
        return cls(
            _zeros(device, pairs, len(Column)),
            _zeros(device, 3, pairs, slots),
            _zeros(device, pairs),
            _zeros(device, 1),
        )


def _zeros(device: torch.device | str, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=device)


def signed(number: int) -> int:
    """Return the int64 that has the bits of an unsigned 64-bit number."""
    return number - (1 << 64) if number >> 63 else number


def unsigned(number: int) -> int:
    """Return the unsigned number that has an int64's bits."""
    return number & ((1 << 64) - 1)
