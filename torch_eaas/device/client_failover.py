"""What a client on a device makes of a step that failed: whom to leave, whom to ask, how long.

The device says which wait failed, how, and in which layer. The host changes the tables, and the
same step, or eagerly what it still lacks, runs again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch_eaas.config import ClientConfig
from torch_eaas.connections import Connections
from torch_eaas.device.client_pairs import DeviceConnection
from torch_eaas.device.client_tables import DeviceTables
from torch_eaas.device.client_words import Failure, Report
from torch_eaas.errors import ExpertUnavailable, PeerTimeout, RequestRefused
from torch_eaas.ops.reference_client import Waited
from torch_eaas.protocol.layout import Status

RETRY_S = 0.002
"""Pause before a server that refused may be asked again."""

LOOK_AGAIN_S = 0.002
"""Pause before somebody who waits for a holder looks again."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What failover works on."""

    config: ClientConfig
    connections: Connections[DeviceConnection]
    tables: DeviceTables
    counters: Counter[str]
    clock: Callable[[], float]
    text: Callable[[Failure], str]
    """Reads what a server that refused said."""


class Patience:
    """One step, or one eager call, from its first failure on.

    Args:
        parts: What it works on.
        own: How many calls of the tables' users it is about: 1 for an eager call, 0 for a step.
    """

    def __init__(self, parts: Parts, own: int) -> None:
        self._parts = parts
        self._own = own
        self._name = parts.config.name
        self._since = parts.clock()
        self._held_up_s = 0.0
        """Of that time, what was spent waiting for a holder."""
        self._missing_since: float | None = None
        self._tried: dict[str, None] = {}
        self._failed: set[str] = set()
        self._is_cold = False
        self._why = ""
        self._layer = 0
        # to be asked only where nobody else holds an expert, until this step is done
        self._avoid: set[str] = set()

    def learn(self, report: Report) -> None:
        """Draw the consequences of a failure, and write the tables for another go.

        Raises:
            ExpertUnavailable: An expert has had no holder for ``recovery_timeout``.
            PeerTimeout: ``request_timeout`` is over.
            RequestRefused: A server refused what nobody else could answer either.
        """
        self._parts.counters["failed_steps"] += 1
        pause = 0.0
        for failure in report.failures:
            pause = max(pause, self._judge(failure))
        if report.missing is not None:
            self._await_holder(*report.missing)
            return
        self._check_time()
        if pause:
            time.sleep(pause)
        self._refresh()

    def _refresh(self) -> None:
        self._parts.tables.refresh(self._avoid, own=self._own)

    # -- one pair ------------------------------------------------------------------------------

    def _judge(self, failure: Failure) -> float:
        """Decide on one pair; return how long to pause before it may be asked again."""
        conn = self._parts.tables.at(failure.pair)
        if failure.waited is Waited.ABORTED:
            # another wait gave up first; this one's answer frees its slot when it comes
            self._note_end(conn)
            return 0.0
        self._tried[conn.name] = None
        self._layer = failure.layer
        if failure.waited is Waited.REFUSED:
            return self._refused(conn, failure)
        if failure.waited is Waited.STRANGE:
            self._parts.counters["stale"] += 1
            self._why = f"{conn.name}: an answer of another life or window"
            self._parts.connections.lose(conn, is_gone=False)
            return 0.0
        self._parts.counters["timeouts"] += 1
        self._late(conn)
        return 0.0

    def _late(self, conn: DeviceConnection) -> None:
        wait_s = self._parts.config.graph_wait.total_seconds()
        self._why = f"client {self._name} had no answer from {conn.name} within {wait_s:.3g} s"
        if self._note_end(conn):
            return
        now = self._parts.clock()
        if conn.late_since is None:
            conn.late_since = now
        patience = self._parts.config.request_timeout.total_seconds()
        if not conn.pair.heard and now - conn.late_since < patience:
            # its first request may take longer: its window stays, and others are asked meanwhile
            self._is_cold = True
            self._avoid.add(conn.name)
        else:
            self._parts.connections.lose(conn, is_gone=False)

    def _note_end(self, conn: DeviceConnection) -> bool:
        """Note it if a server has ended; return whether it has."""
        if conn.link.closed:
            self._parts.connections.lose(conn)
        return conn.lost

    def _refused(self, conn: DeviceConnection, failure: Failure) -> float:
        known = failure.status in Status.__members__.values()
        status = Status(failure.status) if known else Status.INTERNAL
        text = self._parts.text(failure)
        self._parts.counters[f"refused_{status.name.lower()}"] += 1
        self._why = f"{conn.name}: {text}"
        if not status.may_retry or (status is Status.INTERNAL and conn.name in self._failed):
            raise RequestRefused(f"layer {failure.layer}: server {conn.name} refused: {text}")
        if status is Status.STALE:
            self._parts.connections.lose(conn, is_gone=False)
            return 0.0
        if status is Status.INTERNAL:
            self._failed.add(conn.name)
        if status is Status.UNKNOWN_EXPERT:
            self._parts.connections.placement_is_stale = True
        if status is Status.DRAINING:
            self._parts.connections.suspect(conn)
        elif status in (Status.UNKNOWN_EXPERT, Status.INTERNAL):
            self._avoid.add(conn.name)
        return RETRY_S

    # -- time ----------------------------------------------------------------------------------

    def _check_time(self) -> None:
        """Raise PeerTimeout once the time for all replays together is over."""
        config = self._parts.config
        limit = config.first_request_timeout if self._is_cold else config.request_timeout
        # each server that hangs costs one wait, and what follows is not to blame for it
        allowed = limit + config.graph_wait * len(self._tried)
        waited = self._parts.clock() - self._since - self._held_up_s
        if waited > allowed.total_seconds():
            self._parts.counters["given_up"] += 1
            raise PeerTimeout(
                f"layer {self._layer}: client {self._name} waited {waited:.3g} s after the first "
                f"failure, tried {', '.join(self._tried)}: {self._why}"
            )

    def _await_holder(self, layer: int, expert: int) -> None:
        """Wait until somebody can be asked for an expert."""
        parts = self._parts
        now = started = parts.clock()
        if self._missing_since is None:
            self._missing_since = now
        deadline = self._missing_since + parts.config.recovery_timeout.total_seconds()
        parts.connections.wanted_until = deadline
        while True:
            self._refresh()
            if parts.tables.is_held(layer, expert):
                break
            if now >= deadline:
                why = self._why or parts.connections.why_missing()
                raise ExpertUnavailable(layer, expert, tuple(self._tried), why)
            time.sleep(LOOK_AGAIN_S)
            now = parts.clock()
        self._held_up_s += now - started


class DeviceFailover:
    """Notes what became of steps, and begins the patience with those that failed.

    Args:
        parts: What it works on.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def begin(self, *, own: int) -> Patience:
        """Return the patience with a step, or an eager call, that has just failed first."""
        return Patience(self._parts, own)

    def note(self, report: Report) -> None:
        """Note who answered in a step that ended well."""
        for row in report.answered:
            conn = self._parts.tables.at(row)
            if conn.pair.suspect or not conn.was_heard:
                conn.was_heard, conn.late_since = True, None
                self._parts.connections.heard(conn, self._parts.clock())
