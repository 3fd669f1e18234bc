"""The seam between a client and micro-batches that take turns: who waits lets another go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from typing_extensions import override


class Look(Protocol):
    """Waits for words: ``Transport.wait``."""

    def __call__(
        self,
        ready: Callable[[], bool],
        timeout: float,
        waited: float = 0.0,
        *,
        quiet: float = 0.0,
    ) -> bool:
        """Wait until ``ready()`` or until the time is over; return which."""
        ...


class Turn(Protocol):
    """What a thread's calls of a client wait through."""

    @property
    def index(self) -> int:
        """Which micro-batch it is."""
        ...

    def check(self) -> None:
        """Raise if this micro-batch is to end; called once for each ``combine``."""
        ...

    def wait(
        self,
        look: Look,
        ready: Callable[[], bool],
        timeout: float,
        waited: float = 0.0,
        *,
        quiet: float = 0.0,
    ) -> bool:
        """Wait as ``look`` would; meanwhile others may go on.

        Returns:
            Whether ``ready()`` became true while somebody looked. It may have become true before,
            while another computed; then nobody knows when.
        """
        ...


class Alone(Turn):
    """The turn of who shares a client with nobody."""

    @property
    @override
    def index(self) -> int:
        return 0

    @override
    def check(self) -> None:
        pass

    @override
    def wait(
        self,
        look: Look,
        ready: Callable[[], bool],
        timeout: float,
        waited: float = 0.0,
        *,
        quiet: float = 0.0,
    ) -> bool:
        return look(ready, timeout, waited, quiet=quiet)


class ThreadTurn(threading.local):
    """The turn of each thread, and whether it shares it with others."""

    turn: Turn = Alone()
    is_taken = False
