"""How a monitor numbers its placements: above all that members tell it, and not too early."""

from __future__ import annotations

from torch_eaas.monitor.announcement import Known


class Terms:
    """Term and version of one monitor's placements.

    A fresh cluster, in which no member ever heard of a placement, starts with term 1 at once. When
    a member knows another monitor's placement that is not below this one's, nothing is decided
    until a lease has passed since the start (or, later in life, since that news), so that every
    living member has announced itself first; then the term is one above the highest told.

    Args:
        instance: This monitor's instance id.
        lease: Seconds to wait.
        now: When the monitor started.
    """

    def __init__(self, instance: int, lease: float, now: float) -> None:
        self.term = 0
        self.version = 0
        self._instance = instance
        self._lease = lease
        self._start = now
        self._until: float | None = None
        self._told_term = 0
        self._told_version = 0

    @property
    def order(self) -> tuple[int, int]:
        """Term and version of the newest placement."""
        return (self.term, self.version)

    @property
    def waiting(self) -> bool:
        """Whether nothing may be decided yet."""
        return self._until is not None

    def hear(self, known: Known, now: float) -> bool:
        """Note what a member knows; return whether it makes the monitor wait."""
        if known.term < 1 or known.monitor == self._instance:
            return False
        self._told_term = max(self._told_term, known.term)
        self._told_version = max(self._told_version, known.version)
        # equal terms of two monitors say nothing about which is newer, so both give way to a third
        rival = known.term >= self.term if known.monitor else known.order > self.order
        if not rival or self.waiting:
            return False
        first = self._start + self._lease
        self._until = first if now < first else now + self._lease
        return True

    def extend(self, gap: float) -> None:
        """Take no account of a time in which the monitor itself was suspended."""
        self._start += gap
        if self._until is not None:
            self._until += gap

    def settle(self, now: float) -> bool:
        """End the wait if it is over; return whether it ended now."""
        if self._until is None or now < self._until:
            return False
        self._until = None
        self.term = max(self.term, self._told_term + 1)
        self.version = max(self.version, self._told_version)
        return True

    def next(self) -> tuple[int, int]:
        """Return the order of one more placement."""
        assert not self.waiting, "a monitor that waits decides nothing"
        self.term = max(self.term, 1)
        self.version += 1
        return self.order
