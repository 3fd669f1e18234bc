"""A small table in device memory that the host rewrites between replays, without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


class Staged:
    """A tensor on a device, and the pinned memory from which it is written.

    Args:
        on_device: The tensor; graphs know its address, so it is written and never replaced.
    """

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device
        is_cuda = on_device.is_cuda
        self._host = torch.empty(
            on_device.shape, dtype=on_device.dtype, device="cpu", pin_memory=is_cuda
        )
        self._copied = _event() if is_cuda else None

    def write(self, values: Tensor) -> None:
        """Write the whole tensor, in order with the current stream's work."""
        if self._copied is None:
            self.on_device.copy_(values)
            return
        # the copy before this one has read the pinned memory: at most one step ago
        self._copied.synchronize()
        self._host.copy_(values)
        self.on_device.copy_(self._host, non_blocking=True)
        # not the current stream, which is the current GPU's
        self._copied.record(torch.cuda.current_stream(self.on_device.device))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()
