"""Exactly once: originals, the alternatives that may replace them, and which of them counts.

An *original* is what one server was first asked to contribute. If it is late or lost, an
*alternative* asks other holders for the same contributions, in one request or several. Nothing
enters the sum before one alternative is complete; then that one counts and every other answer for
the original is a loser that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum


class Fate(Enum):
    """What a request has come to."""

    WAITING = "waiting"
    ANSWERED = "answered"
    LOST = "lost"


class Request:
    """One frame to one server; drivers subclass it to keep where the frame lies."""

    __slots__ = ("fate", "server")

    def __init__(self, server: str) -> None:
        self.server = server
        self.fate = Fate.WAITING


class Need(Enum):
    """What the driver has to do for an original now."""

    NOTHING = "nothing"
    RESEND = "resend"
    HEDGE = "hedge"
    EXPIRE = "expire"


class Original:
    """One server's share of one dispatch, and every attempt to get it.

    Args:
        now: When it was first sent.
        hedge_after: Seconds without an answer after which another holder is asked too.
        timeout: Seconds until it expires.
    """

    __slots__ = ("_alternatives", "deadline", "hedge_at", "sent_at", "winner")

    def __init__(self, now: float, hedge_after: float, timeout: float) -> None:
        self.sent_at = now
        self.hedge_at = now + hedge_after
        self.deadline = now + timeout
        self.winner: Sequence[Request] | None = None
        self._alternatives: list[Sequence[Request]] = []

    def add(self, requests: Sequence[Request]) -> None:
        """Add an alternative: requests that together carry all contributions of the original."""
        self._alternatives.append(requests)

    @property
    def tried(self) -> list[str]:
        """The servers that were asked, each once, in order."""
        return list(dict.fromkeys(request.server for request in self.requests()))

    def settle(self) -> bool:
        """Return whether one alternative is complete; the first that is becomes the winner."""
        if self.winner is None:
            for requests in self._alternatives:
                # a plain loop: this runs once a server and layer, and generators cost
                for request in requests:
                    if request.fate is not Fate.ANSWERED:
                        break
                else:
                    self.winner = requests
                    break
        return self.winner is not None

    def waiting(self) -> list[Request]:
        """Return the requests whose answer may still come."""
        return [
            request
            for requests in self._alternatives
            for request in requests
            if request.fate is Fate.WAITING
        ]

    def requests(self) -> Iterator[Request]:
        """Yield every request of every alternative."""
        for requests in self._alternatives:
            yield from requests

    def losers(self) -> list[Request]:
        """Return the requests that do not count: all but the winner's."""
        return [
            request
            for requests in self._alternatives
            if requests is not self.winner
            for request in requests
        ]

    def need(self, now: float) -> Need:
        """Return what the driver has to do now."""
        if self.winner is not None:
            return Need.NOTHING
        if now >= self.deadline:
            return Need.EXPIRE
        hopeful = any(
            all(request.fate is not Fate.LOST for request in requests)
            for requests in self._alternatives
        )
        if not hopeful:
            return Need.RESEND
        return Need.HEDGE if now >= self.hedge_at else Need.NOTHING

    def hedged(self, look_again_at: float) -> None:
        """Note that a hedge was sent, or could not be; the next one is due at ``look_again_at``."""
        self.hedge_at = look_again_at
