"""Pairs of windows in this process's memory, as ops and as the protocol's own structs see them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from torch_eaas.ops.pair_table import ClientTables, ServerTables, pair_row
from torch_eaas.protocol.layout import (
    REPLY_FIELDS,
    REPLY_HEADER,
    REQUEST_FIELDS,
    REQUEST_HEADER,
    PairSpec,
)

SPEC = PairSpec(hidden_size=6, top_k=2, slots=4, max_tokens=3)


class Pair:
    """One pair's two windows; ``requests`` and ``replies`` are their bytes.

    Args:
        instance: The client's instance id.
        epoch: The number of the windows.
        spec: What was agreed.
    """

    def __init__(self, instance: int = 7, epoch: int = 1, spec: PairSpec = SPEC) -> None:
        self.instance, self.epoch, self.spec = instance, epoch, spec
        # a tensor's memory begins at a multiple of 64 only
        self._memory = [
            torch.zeros(size + 128, dtype=torch.uint8)
            for size in (spec.request_bytes, spec.reply_bytes)
        ]
        self.memories = {memory.untyped_storage().data_ptr() for memory in self._memory}
        starts = [-memory.data_ptr() % 128 for memory in self._memory]
        self.requests, self.replies = (
            memory.numpy().data[start : start + size]
            for memory, start, size in zip(
                self._memory, starts, (spec.request_bytes, spec.reply_bytes), strict=True
            )
        )
        self.row = torch.tensor(
            pair_row(
                spec,
                requests=self._memory[0].data_ptr() + starts[0],
                replies=self._memory[1].data_ptr() + starts[1],
                instance=instance,
                epoch=epoch,
            )
        )

    def set_request_word(self, slot: int, word: int) -> None:
        self.requests[8 * slot : 8 * slot + 8] = word.to_bytes(8, "little")

    def set_reply_word(self, slot: int, word: int) -> None:
        self.replies[8 * slot : 8 * slot + 8] = word.to_bytes(8, "little")

    def request(self, slot: int, word: int, **changed: int) -> None:
        """Write the header of a good request of one token, but for what is changed, and a word."""
        fields = dict.fromkeys([field.name for field in REQUEST_FIELDS], 0)
        fields |= {"instance": self.instance, "epoch": self.epoch, "sequence": word >> 8}
        fields |= {"budget_us": 1000, "num_tokens": 1, **changed}
        REQUEST_HEADER.pack_into(self.requests, self.spec.request_slot(slot), *fields.values())
        self.set_request_word(slot, word)

    def ids(self, slot: int, ids_TK: list[list[int]]) -> None:
        """Write a request's expert ids."""
        data = torch.tensor(ids_TK, dtype=torch.int32).numpy().tobytes()
        at = self.spec.request_slot(slot) + self.spec.ids_offset
        self.requests[at : at + len(data)] = data

    def reply(self, slot: int, word: int, **changed: int) -> None:
        """Write the header of a good reply of one token, but for what is changed, and a word."""
        fields = dict.fromkeys([field.name for field in REPLY_FIELDS], 0)
        fields |= {"instance": self.instance, "epoch": self.epoch, "sequence": word >> 8, "size": 1}
        fields |= changed
        REPLY_HEADER.pack_into(self.replies, self.spec.reply_slot(slot), *fields.values())
        self.set_reply_word(slot, word)


def client_of(pairs: list[Pair | None], slots: list[int]) -> ClientTables:
    """Return a client's tables; the next request of each pair takes the slot named."""
    tables = ClientTables.empty(len(pairs), SPEC.slots)
    fill(tables.pairs_PC, pairs)
    tables.slots_P.copy_(torch.tensor(slots))
    return tables


def server_of(pairs: list[Pair | None]) -> ServerTables:
    """Return a server's tables."""
    tables = ServerTables.empty(len(pairs), SPEC.slots)
    fill(tables.pairs_PC, pairs)
    return tables


def fill(pairs_PC: Tensor, pairs: list[Pair | None]) -> None:
    for p, pair in enumerate(pairs):
        if pair is not None:
            pairs_PC[p] = pair.row


def numbers(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def address_of(view: memoryview) -> int:
    """Return where a writable view's memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
