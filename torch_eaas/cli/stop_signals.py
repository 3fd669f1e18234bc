"""SIGTERM and SIGINT as a count and a descriptor that wakes a poll."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, Self

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Counts the signals that ask this process to end, within a ``with``; main thread only."""

    def __init__(self) -> None:
        self.count = 0
        """Signals that came so far."""

    @property
    def fd(self) -> int:
        """Readable once a signal came; ``clear`` makes it silent again."""
        return self._reader

    def clear(self) -> None:
        """Read what made the descriptor readable; the count stays."""
        try:
            os.read(self._reader, 1 << 10)
        except BlockingIOError:
            pass

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._note) for number in _NUMBERS
        }
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
