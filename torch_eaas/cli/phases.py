"""Where the time of a generation went, token by token."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mark:
    """The moment at which a token was there."""

    time: float
    """Seconds, monotonic."""

    counters: Mapping[str, int]
    """What ``Client.counters`` said then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Some tokens of a generation, in one row of a table; times are milliseconds a token."""

    name: str
    """What went on meanwhile."""

    tokens: int
    """How many; the first of a generation is left out, since the prompt is part of its time."""

    total_ms: float
    """All of it."""

    experts_ms: float
    """The experts: what the slowest server of each layer spent on them, or the local ones."""

    waiting_ms: float
    """Waiting for the servers beyond that: the wire, their polling, their queues, failover."""

    bookkeeping_ms: float
    """The client's own part: choosing servers, copying, adding up."""

    longest_ms: float
    """The longest gap between two tokens."""

    median_ms: float
    """The median gap."""

    resends: int
    """Requests that were asked again of another server."""

    hedges: int
    """Requests that were late and were asked of another server too."""

    @property
    def rest_ms(self) -> float:
        """The same with local experts: attention, routers, shared experts, sampling."""
        return self.total_ms - self.experts_ms - self.waiting_ms - self.bookkeeping_ms

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return 1000 / self.total_ms

    def to_json(self) -> dict[str, Any]:
        """Return all figures, those derived too."""
        figures = {**asdict(self), "rest_ms": self.rest_ms, "tokens_per_s": self.tokens_per_s}
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}


def phase_of(name: str, marks: Sequence[Mark]) -> Phase | None:
    """Return the phase from the first mark to the last; None if no token lies between.

    Example:
        Marks at 0 s and 0.5 s, with ``wait_us`` 200,000 and ``experts_us`` 150,000 in between,
        are one token of 500 ms: 150 ms experts, 50 ms waiting, 300 ms the rest.
    """
    if len(marks) < 2:
        return None
    tokens = len(marks) - 1
    first, last = marks[0], marks[-1]

    def grown(counter: str) -> int:
        return last.counters.get(counter, 0) - first.counters.get(counter, 0)

    experts, wait = grown("experts_us"), grown("wait_us")
    gaps = [b.time - a.time for a, b in itertools.pairwise(marks)]
    return Phase(
        name=name,
        tokens=tokens,
        total_ms=1000 * (last.time - first.time) / tokens,
        experts_ms=experts / tokens / 1000,
        waiting_ms=max(wait - experts, 0) / tokens / 1000,
        bookkeeping_ms=grown("bookkeeping_us") / tokens / 1000,
        longest_ms=1000 * max(gaps),
        median_ms=1000 * statistics.median(gaps),
        resends=grown("resends"),
        hedges=grown("hedges"),
    )
