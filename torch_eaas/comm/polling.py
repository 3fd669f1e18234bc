"""Waiting for a word in shared memory: look, then sleep between looks.

A sleep needs nothing from the writer and never collapses: spinning or yielding alone costs 4 to
8 ms a round trip as soon as pollers and compute outnumber the cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable

SPIN_S = 200e-6
"""How long a fresh wait only looks, where looking has paid lately."""

FRESH_S = 1e-3
"""A wait that has lasted longer sleeps at once."""

SHORTEST_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 200e-6
IDLE_S = 1.0
IDLE_SLEEP_S = 500e-6
SLEEP_SHARE = 1 / 16
"""A sleep lasts this share of the wait so far: each wake-up costs some 40 us of a core, which is
then missing where processes outnumber cores, and a wait is never prolonged by more than it."""

SPIN_CREDIT = 8
SPIN_AGAIN = 32
"""After ``SPIN_CREDIT`` spins in vain a thread spins only each ``SPIN_AGAIN``-th time."""

_PR_SET_TIMERSLACK = 29


class Poller:
    """Waits for words; remembers for each thread whether spinning has paid lately."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def wait(
        self, ready: Callable[[], bool], timeout: float, waited: float = 0.0, quiet: float = 0.0
    ) -> bool:
        """Wait until ``ready()`` or until the time is over; see ``Transport.wait``."""
        if ready():
            return True
        self._make_sleeps_precise()
        if quiet > SHORTEST_SLEEP_S:
            time.sleep(quiet)
        if waited < FRESH_S and self._spin(ready, min(SPIN_S, timeout)):
            return True
        start = now = time.monotonic()
        while now - start < timeout:
            so_far = waited + now - start
            longest = LONGEST_SLEEP_S if so_far < IDLE_S else IDLE_SLEEP_S
            pause = min(longest, so_far * SLEEP_SHARE)
            time.sleep(min(max(pause, SHORTEST_SLEEP_S), timeout))
            if ready():
                return True
            now = time.monotonic()
        return False

    def _spin(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Look for a moment without a sleep, if that has paid lately; return whether it did."""
        spins = self._thread
        credit = getattr(spins, "credit", SPIN_CREDIT)
        if credit <= 0:
            spins.turn = getattr(spins, "turn", 0) + 1
            if spins.turn % SPIN_AGAIN:
                return False
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if ready():
                spins.credit = SPIN_CREDIT
                return True
        spins.credit = credit - 1
        return False

    def _make_sleeps_precise(self) -> None:
        """Let this thread's sleeps end on time: the kernel adds up to 50 us by default."""
        if not hasattr(self._thread, "sleeps_precisely"):
            self._thread.sleeps_precisely = True
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
