"""The memory of a slab's slots, and how an expert's weights come into one.

Shape legend: S slots, D hidden, I intermediate, P = I padded to whole blocks; d, p blocks of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_eaas.config import Storage
from torch_eaas.device.stream import DeviceStream
from torch_eaas.errors import ConfigError
from torch_eaas.experts import STORAGE_DTYPES, ExpertWeights

BLOCK = 128
"""Rows, and columns, of an FP8 weight that share a scale."""


COPY_S = 60.0
"""How long one matrix's copy may take before the device counts as hanging."""


class Slots(NamedTuple):
    """One matrix of every slot."""

    numbers: Tensor
    """``(S, N, K)``."""

    scales: Tensor
    """Block scales, ``(S, ceil(N / 128), ceil(K / 128))`` fp32; empty where there are none."""


class SlabMemory:
    """The matrices of a fixed number of experts on a device, gate and up stacked.

    Args:
        hidden_size: D.
        intermediate_size: I.
        slots: S.
        storage: How numbers are kept. In FP8 gate and up are padded with zeros, each to whole
            blocks, so that no block holds numbers of both.
        device: Where.

    Raises:
        ConfigError: The device has too little memory.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        slots: int,
        storage: Storage,
        device: torch.device,
    ) -> None:
        self._dtype = STORAGE_DTYPES[storage]
        self._is_fp8 = storage == "fp8"
        self._device = device
        padded = -(-intermediate_size // BLOCK) * BLOCK if self._is_fp8 else intermediate_size
        self._padded = padded
        _check_memory(device, slots, 3 * hidden_size * padded * self._dtype.itemsize)
        self.gate_up = self._slots(slots, 2 * padded, hidden_size)
        """``(S, 2 P, D)``."""
        self.down = self._slots(slots, hidden_size, padded)
        """``(S, D, P)``."""
        # beside the serving stream: nothing waits for a load. Of its kind, for a usual one could be
        # the stream on which another thread captures, and loads would become part of that graph
        self._stream = DeviceStream(device, is_first=True)
        largest = hidden_size * padded * self._dtype.itemsize
        is_cuda = device.type == "cuda"
        self._staging = torch.empty(
            largest if is_cuda else 0, dtype=torch.uint8, pin_memory=is_cuda
        )

    def load(self, slot: int, weights: ExpertWeights) -> None:
        """Copy an expert's weights into a slot that nobody reads; returns when they are there."""
        if self._is_fp8:
            self._load_fp8(slot, weights)
        else:
            targets = (*self.gate_up.numbers[slot].chunk(2), self.down.numbers[slot])
            for target, matrix in zip(targets, weights.dequantized(), strict=True):
                self._copy(target, matrix)

    def _load_fp8(self, slot: int, weights: ExpertWeights) -> None:
        if weights.scales is None or weights.block != (BLOCK, BLOCK):
            weights = ExpertWeights(*weights.dequantized()).quantized()
        assert weights.scales is not None
        targets = (*self.gate_up.numbers[slot].chunk(2), self.down.numbers[slot])
        scales = (*self.gate_up.scales[slot].chunk(2), self.down.scales[slot])
        matrices = (weights.gate_ID, weights.up_ID, weights.down_DI)
        for target, matrix in zip((*targets, *scales), (*matrices, *weights.scales), strict=True):
            self._copy(target[: matrix.shape[0], : matrix.shape[1]], matrix)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Copy a matrix through pinned memory: a copy from elsewhere would stop the device."""
        self._stream.follow()
        with self._stream.current():
            if source.device == target.device:
                target.copy_(source)
            else:
                staged = self._staging[: source.numel() * target.element_size()]
                staged = staged.view(target.dtype).view(source.shape)
                staged.copy_(source)
                target.copy_(staged, non_blocking=True)
        self._stream.mark().wait(COPY_S)

    def _slots(self, slots: int, rows: int, columns: int) -> Slots:
        numbers = torch.zeros((slots, rows, columns), dtype=self._dtype, device=self._device)
        grid = (slots, -(-rows // BLOCK), -(-columns // BLOCK)) if self._is_fp8 else (0, 0, 0)
        return Slots(numbers, torch.ones(grid, device=self._device))


def _check_memory(device: torch.device, slots: int, slot_bytes: int) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if slots * slot_bytes > free:
        raise ConfigError(
            f"{slots} slots of {slot_bytes / 2**20:.1f} MiB need {slots * slot_bytes / 2**30:.1f} "
            f"GiB, and {device} has {free / 2**30:.1f} GiB free; take fewer slots, or storage fp8"
        )
