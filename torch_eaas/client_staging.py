"""How tensors of a GPU reach servers on CPUs, and how the answer comes back: by pinned memory.

Shape legend: T tokens, K experts per token, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from torch_eaas.capture import refuse_capture
from torch_eaas.errors import ConfigError

logger = logging.getLogger(__name__)


class Staging:
    """Copies a call's tensors to the host with one wait, and its answer back with none.

    torch keeps pinned memory by size, and gives a block to a new tensor once all copies from and to
    it are over: so calls of one size reuse theirs, and none that is still being copied.

    Args:
        name: The client's name, for messages.
        pin: Makes an uninitialised pinned tensor like another one.
        wait: Waits for what a device was asked to do so far.
    """

    def __init__(
        self,
        name: str,
        *,
        pin: Callable[[Tensor], Tensor] | None = None,
        wait: Callable[[torch.device], None] | None = None,
    ) -> None:
        self._name = name
        self._pin = pin or _pinned_like
        self._wait = wait or _wait_for
        self._was_said = False

    def to_host(self, layer: int, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors on the CPU; waits for the device, once.

        Raises:
            ConfigError: A tensor is on neither the CPU nor a GPU, two are on different GPUs, or a
                capture is under way.
        """
        devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
        if len(devices) > 1 or not all(tensor.is_cpu or tensor.is_cuda for tensor in tensors):
            where = ", ".join(sorted(str(tensor.device) for tensor in tensors))
            raise ConfigError(
                f"layer {layer}: hidden states, ids and weights must be on the CPU or on one "
                f"CUDA device, got {where}"
            )
        self.refuse_capture()
        self._say(*devices)
        copies = [
            tensor if tensor.is_cpu else self._pin(tensor).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        self._wait(*devices)
        return copies

    def to_device(self, rows_TD: Tensor, device: torch.device) -> Tensor:
        """Return a copy of the rows on a GPU, in the order of its stream; does not wait."""
        self.refuse_capture()
        return self._pin(rows_TD).copy_(rows_TD).to(device, non_blocking=True)

    def refuse_capture(self) -> None:
        """Raise ConfigError if a capture is under way."""
        refuse_capture(
            f"client {self._name}", "a DeviceClient, whose servers are on GPUs (DeviceServer)"
        )

    def _say(self, device: torch.device) -> None:
        if not self._was_said:
            self._was_said = True
            logger.warning(
                "client %s: tensors on %s, servers on CPUs: each dispatch waits for the device and "
                "copies through pinned memory; a DeviceClient with DeviceServers does without",
                self._name,
                device,
            )


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _wait_for(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()
