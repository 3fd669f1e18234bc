"""When a draining server may leave: pure, stepped with the server's clock."""

from __future__ import annotations

QUIET_S = 1.0
"""A draining server leaves when nobody has asked it for this long."""


class DrainState:
    """How far one server's drain has come.

    First another server must hold what this one holds last, as long as the monitor expects that;
    then its clients must have gone there; and all of it has one time limit.

    Args:
        timeout: Seconds after which the server leaves all the same.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._started: float | None = None
        self._handed_over: float | None = None

    def begin(self, now: float) -> bool:
        """Start; return whether it had not started before."""
        if self._started is not None:
            return False
        self._started = now
        return True

    def hear(self, pending: int, now: float) -> None:
        """Note for how many experts the monitor still expects another holder."""
        if pending:
            self._handed_over = None
        elif self._handed_over is None:
            self._handed_over = now

    def is_over(self, now: float, last_answer: float, *, is_alone: bool) -> bool:
        """Return whether the server may leave.

        Args:
            now: The time.
            last_answer: When it last answered a request.
            is_alone: Whether there is no monitor that could find another holder.
        """
        if self._started is None:
            return False
        if now - self._started > self._timeout:
            return True
        began = self._started if is_alone else self._handed_over
        return began is not None and now - max(began, last_answer) > QUIET_S
