"""What the host drives cannot be captured in a CUDA graph, and says so."""

from __future__ import annotations

import torch

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
    is_up = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    if is_up and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"{what} is driven by the host, and a CUDA graph captures nothing that the host does; "
            f"use {instead}, or call it outside the capture"
        )
