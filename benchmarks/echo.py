"""What is sent to and fro, and the two ends of a variant."""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

HIDDEN = 7168
"""DeepSeek-R1's width."""

SIZES = {"64B": (1, 32), "14k": (1, HIDDEN), "900k": (64, HIDDEN)}
"""Name to tokens and width, in bf16: 64, 14,336 and 917,504 bytes."""

TIMEOUT_S = 10.0
"""How long either end waits for the other."""

Side = Literal["client", "server"]


class Echo(Protocol):
    """One way to send a payload to another process and get it back; both ends build one."""

    def __init__(self, side: Side, folder: Path, pipe: Pipe) -> None:
        """Take the side, a folder that both ends see, and the pipe that commands come over."""
        ...

    @staticmethod
    def missing() -> str:
        """Return what this variant lacks on this machine, or nothing."""
        return ""

    def trip(self, size: str, count: int) -> list[float]:
        """Send and await ``count`` payloads, as the client; return the seconds of each."""
        ...

    def echo(self, size: str, count: int) -> None:
        """Return ``count`` payloads, as the server."""
        ...

    def close(self) -> None:
        """Close the client's end."""
        ...


def payload(size: str) -> Tensor:
    """Return the hidden states to send, ``(T, D)`` in bf16; different rows."""
    num_tokens, hidden = SIZES[size]
    return torch.arange(num_tokens * hidden).reshape(num_tokens, hidden).to(torch.bfloat16)


def check_same(got: object, size: str) -> None:
    """Raise ValueError unless a buffer holds the payload."""
    wanted = payload(size).view(torch.int16).numpy().tobytes()
    if bytes(memoryview(got).cast("B")) != wanted:  # type: ignore[arg-type]  # any buffer
        raise ValueError(f"the echo of {size} differs from what was sent")
