"""How long nothing needs to be looked for: what comes again comes no sooner than lately."""

from __future__ import annotations

QUIET_SHARE = 0.8
DRIFT = 1.05
SHORTEST_S = 1e-6


class Quiet:
    """Remembers the shortest of some waits, and forgets it slowly, so that it follows what changes.

    One long sleep costs one wake-up, polling one for each look: whoever polls takes a core away
    from those whom it waits for.

    Args:
        longest_s: The most seconds that ``seconds`` returns.

    Example:
        After waits of 10, 12 and 13 ms it is quiet for 8.8 ms: 0.8 times 10 ms, which were
        forgotten by 5 % twice.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._shortest_s = 0.0

    def add(self, waited_s: float) -> None:
        """Note a wait, quiet part included."""
        shortest = self._shortest_s * DRIFT if self._shortest_s else waited_s
        self._shortest_s = max(SHORTEST_S, min(waited_s, shortest))

    @property
    def seconds(self) -> float:
        """For how long after its beginning a wait needs no look."""
        return min(QUIET_SHARE * self._shortest_s, self._longest_s)
