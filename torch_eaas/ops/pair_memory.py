"""A pair's windows as the plain twins see them: by address, on a CPU.

Shape suffixes: see ``pair_table``.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from torch_eaas.ops.pair_table import Column
from torch_eaas.protocol.layout import WORD_BYTES


class PairMemory:
    """One row of the table of pairs."""

    def __init__(self, pairs_PC: Tensor, pair: int) -> None:
        self._row: list[int] = pairs_PC[pair].tolist()

    def __getitem__(self, column: Column) -> int:
        return self._row[column]

    def word(self, window: Column, slot: int) -> ctypes.c_uint64:
        """Return a slot's word where it lies: one access of ``value`` is one of 8 bytes."""
        return ctypes.c_uint64.from_address(self[window] + slot * WORD_BYTES)

    def slot(self, window: Column, slot: int, offset: int, num_bytes: int) -> memoryview:
        """Return some bytes of a slot where they lie."""
        size = Column.REQUEST_SLOT_BYTES if window is Column.REQUESTS else Column.REPLY_SLOT_BYTES
        at = self[window] + self[Column.WORDS_BYTES] + slot * self[size] + offset
        return memoryview((ctypes.c_char * num_bytes).from_address(at)).cast("B")


def copy_bits(part: Tensor, to: memoryview) -> None:
    """Copy a tensor's bits."""
    to[:] = part.contiguous().view(torch.uint8).numpy().data.cast("B")
