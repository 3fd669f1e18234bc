"""When a process that ended is started again: back-off and a cap, without a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often, and how soon, a role's process is started again after a failure."""

    max_restarts: int = 5
    """Restarts in a row; the failure after the last one is final."""

    first_delay: timedelta = timedelta(seconds=0.5)
    """Before the first restart; each further one in a row waits twice as long."""

    longest_delay: timedelta = timedelta(seconds=30)
    """No restart waits longer."""

    settled_after: timedelta = timedelta(seconds=60)
    """A process that served for this long was well: the count begins anew."""


class Restarts:
    """Counts one role's restarts, stepped with the caller's seconds.

    Example:
        With two restarts allowed, failures at 10 s, 11 s and 13 s give restarts at 10.5 s and 12 s,
        and then None.

    Args:
        policy: How many, and how soon.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.count = 0
        """Restarts in a row so far."""
        self._serving_since: float | None = None

    def served(self, now: float) -> None:
        """Take note that the process serves now: only that, not a long start, shows it well."""
        self._serving_since = now

    def failed(self, now: float) -> float | None:
        """Take note of a failure.

        Returns:
            When to start the process again, or None if it is not to be.
        """
        since, self._serving_since = self._serving_since, None
        if since is not None and now - since >= self.policy.settled_after.total_seconds():
            self.count = 0
        if self.count >= self.policy.max_restarts:
            return None
        # the exponent is bounded: a float would overflow after a thousand restarts
        delay = self.policy.first_delay.total_seconds() * 2.0 ** min(self.count, 64)
        self.count += 1
        return now + min(delay, self.policy.longest_delay.total_seconds())
