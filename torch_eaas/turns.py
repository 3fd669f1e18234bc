"""The baton: of some micro-batches, each in a thread, at most one computes.

A micro-batch *rests* while it waits for its experts. Who comes to rest passes the turn to one that
can go on: one that has not begun, or one whose answers have come. If there is none, it looks for
all of them, so that nobody ever polls while another computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum

from typing_extensions import override

from torch_eaas.client_turns import Look, Turn
from torch_eaas.errors import TurnTimeout

LOOK_UP_S = 1.0
"""How often a micro-batch that waits for its turn looks whether the others get on."""


class Ended(BaseException):
    """Another micro-batch has failed: this one ends too. Not an error of its own."""


class State(Enum):
    """What a micro-batch does."""

    FRESH = "fresh"
    COMPUTING = "computing"
    RESTING = "resting"
    DONE = "done"


def _nothing() -> bool:
    return False


class Place(Turn):
    """One micro-batch's place among those that take turns; used in its thread alone."""

    def __init__(self, turns: Turns, index: int) -> None:
        self._turns = turns
        self._index = index
        self.state = State.FRESH
        self.go = threading.Lock()
        self.go.acquire(blocking=False)
        self.ready: Callable[[], bool] = _nothing
        self.since = self.quiet_until = self.due = 0.0
        self.was_seen = False

    @property
    @override
    def index(self) -> int:
        return self._index

    def can_go_on(self) -> bool:
        """Return whether it has something to compute."""
        return self.state is State.FRESH or (self.state is State.RESTING and self.ready())

    def begin(self) -> None:
        """Wait for the first turn."""
        self._turns.begin(self)

    @override
    def check(self) -> None:
        self._turns.check()

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
        now = self._turns.clock()
        self.since, self.quiet_until, self.due = now, now + quiet, now + quiet + timeout
        return self._turns.rest(self, look, ready)

    def end(self, error: BaseException | None) -> None:
        """Leave for good, with the error that ended it, if any."""
        self._turns.end(self, error)


class Turns:
    """Whose turn it is; micro-batch 0 begins.

    Args:
        count: Micro-batches.
        timeout: The most seconds that one may compute without asking for experts.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, count: int, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.error: BaseException | None = None
        """What the first micro-batch that failed raised; all others end."""
        self.places = [Place(self, index) for index in range(count)]
        self._timeout = timeout
        self._lock = threading.Lock()
        self._holder: Place | None = self.places[0]
        self._moved_at = clock()

    def stop(self, error: BaseException) -> None:
        """Let every micro-batch end where it next asks for its experts."""
        with self._lock:
            self.error = self.error or error

    @property
    def idle_s(self) -> float:
        """Seconds since anybody has asked for experts, or ended."""
        return self.clock() - self._moved_at

    def too_long(self, who: str) -> TurnTimeout:
        """Return the error of who has waited too long for the one that computes."""
        holder = self._holder
        return TurnTimeout(
            f"{who} waited for micro-batch {holder.index if holder else '?'}, which has computed "
            f"for {self.idle_s:.3g} s without asking for experts; if it does not hang, raise "
            f"timeout (now {self._timeout:g} s)"
        )

    def check(self) -> None:
        """Note that the holder gets on; raise Ended if all are to end."""
        self._moved_at = self.clock()
        if self.error is not None:
            raise Ended

    def begin(self, place: Place) -> None:
        """Wait for a place's first turn."""
        self._await_turn(place)
        with self._lock:
            place.state = State.COMPUTING

    def rest(self, place: Place, look: Look, ready: Callable[[], bool]) -> bool:
        """Give the turn to who can go on, and have it again once ``ready()`` or ``place.due``.

        Returns:
            Whether the answer came while somebody looked.
        """
        self.check()
        try:
            with self._lock:
                place.state, place.ready = State.RESTING, ready
                chosen = self._pass_on(place)
            if chosen is None:
                came = self._look(look)
                with self._lock:
                    chosen = self._pass_on(place, came=came, in_any_case=True)
            if chosen is place:
                self.check()
            else:
                self._await_turn(place)
            return place.was_seen
        finally:
            with self._lock:
                place.state, place.ready = State.COMPUTING, _nothing

    def end(self, place: Place, error: BaseException | None) -> None:
        """Take a micro-batch out; whoever is left goes on."""
        with self._lock:
            place.state = State.DONE
            self._moved_at = self.clock()
            if error is not None and not isinstance(error, Ended):
                self.error = self.error or error
            if self._holder is place:
                # if nobody can go on, the one whose time is over first looks for all
                self._holder = self._pass_on(None, in_any_case=True)

    # -- passing the turn ----------------------------------------------------------------------

    def _pass_on(
        self, mine: Place | None, *, came: bool = False, in_any_case: bool = False
    ) -> Place | None:
        """Give the turn to who goes on and return it; the caller holds the lock.

        That is whoever has the turn rather than others, then who rests longest; and if nobody can
        go on, ``in_any_case``, the one whose time is over first.
        """
        resting = [p for p in self.places if p.state in (State.FRESH, State.RESTING)]
        able = [place for place in resting if place.can_go_on()]
        if mine is not None and (mine in able or self.error is not None):
            chosen: Place | None = mine
        elif able and self.error is None:
            chosen = min(able, key=lambda p: p.since)
        elif in_any_case:
            chosen = min(resting, key=lambda p: p.due, default=None)
        else:
            return None
        if chosen is not None:
            chosen.was_seen = came and chosen in able
            self._holder = chosen
            if chosen is not mine and chosen.go.locked():
                chosen.go.release()
        return chosen

    def _look(self, look: Look) -> bool:
        """Look for the answers of all that rest, until one comes or somebody's time is over."""
        with self._lock:
            resting = [p for p in self.places if p.state is State.RESTING]
            readies = [p.ready for p in resting]
            quiet_until = min(p.quiet_until for p in resting)
            due = min(p.due for p in resting)
        now = self.clock()
        return look(
            lambda: any(ready() for ready in readies),
            max(0.0, due - max(now, quiet_until)),
            max(0.0, now - quiet_until),
            quiet=max(0.0, quiet_until - now),
        )

    def _await_turn(self, place: Place) -> None:
        """Sleep until it is a place's turn; who passes it wakes nobody else."""
        while self._holder is not place:
            woken = place.go.acquire(timeout=min(LOOK_UP_S, self._timeout))
            if not woken and self.idle_s > self._timeout and self._holder is not place:
                raise self.too_long(f"micro-batch {place.index}")
        self.check()
