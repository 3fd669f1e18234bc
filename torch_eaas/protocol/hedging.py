"""When a request without an answer goes to another holder too, and how many extra ones may.

A request is late after three times the p99 of its pair's requests of like size. What is late may
be a stall of one server, and then the extra request saves the step; or every server is
overloaded, and then extra requests make it worse. So they have a budget.
"""

from __future__ import annotations

from collections import deque

FACTOR = 3.0
"""A request is late after this many times its size class's p99."""

SHORTEST_S = 0.005
"""Nothing is late before this."""

UNKNOWN_S = 0.1
"""A request is late after this while fewer than ``FEW`` of its size class are known."""

FEW = 20
KEPT = 128
"""Latencies that are kept of each size class."""

REVIEW = 16
"""The p99 is computed anew after this many latencies."""

EXTRA_SHARE = 0.05
ALWAYS = 8
"""Extra requests that are allowed however few requests there were."""

WINDOW_S = 60.0
BUCKETS = 12


class Latencies:
    """How long one pair's requests took, by size class: powers of two of tokens.

    Example:
        After 20 requests of 4 to 7 tokens that took 10 ms each, ``late_after(5)`` is 30 ms.
    """

    def __init__(self) -> None:
        self._kept: dict[int, deque[float]] = {}
        self._late_after: dict[int, float] = {}
        self._fresh: dict[int, int] = {}

    def add(self, num_tokens: int, seconds: float) -> None:
        """Note a request: its tokens, and what it took (or has taken, if it is late)."""
        size_class = num_tokens.bit_length()
        kept = self._kept.get(size_class)
        if kept is None:
            kept = self._kept[size_class] = deque(maxlen=KEPT)
            self._fresh[size_class] = 0
        kept.append(seconds)
        fresh = self._fresh[size_class] + 1
        if len(kept) >= FEW and (fresh >= REVIEW or size_class not in self._late_after):
            fresh = 0
            p99 = sorted(kept)[int(0.99 * (len(kept) - 1))]
            self._late_after[size_class] = max(SHORTEST_S, FACTOR * p99)
        self._fresh[size_class] = fresh

    def late_after(self, num_tokens: int) -> float:
        """Return the seconds after which a request of so many tokens is late."""
        return self._late_after.get(num_tokens.bit_length(), UNKNOWN_S)


class HedgeBudget:
    """How many extra requests a client may send: a share of its last minute's, or a few.

    Example:
        With 1000 requests in the last minute 50 may be extra; with 10 of them, 8.
    """

    def __init__(self) -> None:
        # each bucket: its number, requests, extra ones
        self._buckets: deque[list[int]] = deque(maxlen=BUCKETS)

    def sent(self, count: int, now: float) -> None:
        """Note ordinary requests."""
        self._bucket(now)[1] += count

    def take(self, count: int, now: float) -> bool:
        """Return whether so many extra requests may be sent now; if so they count."""
        bucket = self._bucket(now)
        oldest = bucket[0] - BUCKETS
        recent = [b for b in self._buckets if b[0] > oldest]
        allowed = max(float(ALWAYS), EXTRA_SHARE * sum(b[1] for b in recent))
        if sum(b[2] for b in recent) + count > allowed:
            return False
        bucket[2] += count
        return True

    def _bucket(self, now: float) -> list[int]:
        number = int(now * BUCKETS / WINDOW_S)
        if not self._buckets or self._buckets[-1][0] != number:
            self._buckets.append([number, 0, 0])
        return self._buckets[-1]
