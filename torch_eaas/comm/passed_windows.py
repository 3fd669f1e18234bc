"""How windows are passed in a control call: in words, or as descriptors beside a frame."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch_eaas.comm.frames import MAX_FDS
from torch_eaas.comm.window import Window, WindowMaker
from torch_eaas.errors import TransportError


def hand_on(windows: Sequence[Window], maker: WindowMaker) -> tuple[list[Any], list[int]]:
    """Return what a frame says of windows, and the descriptors that go beside it."""
    told = [maker.tell(window) for window in windows]
    return told, [] if maker.in_words else [window.fd for window in windows]


def adopt_windows(fds: list[int], told: Any, maker: WindowMaker) -> list[Window]:
    """Return the windows that a frame brought; on any fault all of them are closed."""
    adopted: list[Window] = []
    try:
        if not isinstance(told, list):
            raise TransportError(f"a frame's windows are a list of sizes, got {told!r}")
        if maker.in_words:
            _check_words(fds, told, maker)
        elif len(fds) != len(told):
            raise TransportError(f"a frame announces {len(told)} windows and brings {len(fds)}")
        for each in told:
            adopted.append(maker.adopt(fds.pop(0) if fds else -1, each))
    except BaseException:
        close_windows(adopted)
        close_all(fds)
        raise
    return adopted


def close_all(fds: list[int]) -> None:
    """Close descriptors that nobody took."""
    for fd in fds:
        os.close(fd)


def close_windows(windows: Sequence[Window]) -> None:
    """Close windows that nobody took."""
    for window in windows:
        window.close()


def _check_words(fds: list[int], told: list[Any], maker: WindowMaker) -> None:
    if fds:
        raise TransportError(
            f"windows of {maker.name} are told in words, and this frame brings {len(fds)} "
            f"descriptors; do both ends use this transport?"
        )
    if len(told) > MAX_FDS:
        raise TransportError(f"a frame brings at most {MAX_FDS} windows, got {len(told)}")
