"""Memory that the processes of a failover run share: what each does now, and what became of it.

It outlives them: a server that is killed while its experts run leaves its mark standing.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

IDLE, RUN, END = 0, 1, 2

MAX_FORWARDS = 1 << 17
"""Forwards of one client that are remembered."""


class Marks:
    """Numbers by server and by client; each has one writer at a time.

    Args:
        num_servers: Servers at most.
        num_clients: Clients at most.
    """

    def __init__(self, num_servers: int, num_clients: int) -> None:
        # memory of this kind may be handed to a process when that is spawned
        array = multiprocessing.get_context("spawn").RawArray
        self.in_hand: Any = array("b", num_servers)
        """1 while a server's experts run."""
        self.pairs: Any = array("i", num_servers)
        """Clients of a server, -1 while it is down."""
        self.command: Any = array("b", num_clients)
        """What a client is to do."""
        self.state: Any = array("b", num_clients)
        """What a client does; END while it is down."""
        self.done: Any = array("q", num_clients)
        """Forwards that gave an answer."""
        self.failed: Any = array("q", num_clients)
        """Forwards that raised."""
        self.wrong: Any = array("q", num_clients)
        """Answers that were not the local one."""
        self.busy_s: Any = array("d", num_clients)
        """Seconds spent in forwards and their checks."""
        self._started: Any = array("d", num_clients * MAX_FORWARDS)
        self._took: Any = array("d", num_clients * MAX_FORWARDS)

    def record(self, client: int, started: float, took: float) -> None:
        """Note a forward that gave an answer."""
        at = client * MAX_FORWARDS + self.done[client] % MAX_FORWARDS
        self._started[at], self._took[at] = started, took
        self.done[client] += 1

    def forwards(self, client: int, first: int) -> list[tuple[float, float]]:
        """Return start and seconds of a client's forwards, from number ``first`` on."""
        last = self.done[client]
        places = (client * MAX_FORWARDS + n % MAX_FORWARDS for n in range(first, last))
        return [(self._started[at], self._took[at]) for at in places]
