"""What the host drives runs on no GPU and is captured in no CUDA graph, and says so."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_eaas.errors import ConfigError


def refuse_capture(what: str, instead: str) -> None:
    """Raise if the current stream is being captured.

    Args:
        what: Who is called, for the message.
        instead: What can be captured.

    Raises:
        ConfigError: A capture is under way.
    """
    # a torch without CUDA cannot even ask
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"{what} is driven by the host, and a CUDA graph captures nothing that the host does; "
            f"use {instead}, or call it outside the capture"
        )


def refuse_device(what: str, instead: str, tensor: Tensor) -> None:
    """Raise if a tensor is not on the CPU, or if the current stream is being captured.

    Args:
        what: Who is called, for the message.
        instead: What runs on a GPU.
        tensor: What it was given.

    Raises:
        ConfigError: It is one or the other.
    """
    if not tensor.is_cpu:
        raise ConfigError(
            f"{what} runs on the CPU, got a tensor on {tensor.device}; on a GPU use {instead}"
        )
    refuse_capture(what, instead)
