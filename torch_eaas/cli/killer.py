"""A planned death: one server, while a token is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LONGEST_S = 10.0
"""How long the kill may be waited for: half the time of a token, and then it is done."""


class Killer:
    """Kills after a token, halfway to the next one, when requests are under way.

    Args:
        kill: Kills; called from a thread of its own.
        after: The count of tokens after which to kill.
    """

    def __init__(self, kill: Callable[[], None], after: int) -> None:
        self.after = after
        self.has_killed = False
        self._kill = kill
        self._timer: threading.Timer | None = None
        self._first_at = 0.0

    def see(self, count: int) -> bool:
        """Take note of a token; return whether the kill came between it and the one before.

        Args:
            count: Tokens so far.
        """
        if self._timer is not None:
            self._timer.join(_LONGEST_S)
            self._timer = None
            return True
        if count == 1:
            self._first_at = time.monotonic()
        if count == self.after:
            gap = (time.monotonic() - self._first_at) / max(count - 1, 1)
            self._timer = threading.Timer(gap / 2, self._strike)
            self._timer.start()
        return False

    def _strike(self) -> None:
        self._kill()
        self.has_killed = True
