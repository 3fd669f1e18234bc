"""A member's side of the control plane: one thread that reports and brings placements."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from torch_eaas.access import OPEN, Access
from torch_eaas.config import LEASE
from torch_eaas.errors import AccessDenied, RequestRefused, TransportError
from torch_eaas.monitor.announcement import (
    Announcement,
    Known,
    ModelInfo,
    holdings_json,
    instance_text,
)
from torch_eaas.monitor.link import MonitorLink, Reply, fetch_placement
from torch_eaas.monitor.listener import EventListener
from torch_eaas.placement import Holdings, Placement

__all__ = ["Announcement", "ModelInfo", "MonitorAgent", "fetch_placement"]

logger = logging.getLogger(__name__)

_SHORTEST_HEARTBEAT = 0.01
_REST = 0.05
_FIRST_RETRY = 0.1
_LAST_RETRY = 2.0
_CLOSE_SECONDS = 1.0
_LEAVE_TIMEOUT = timedelta(seconds=0.5)
_DELIVERY_SECONDS = 1.0
_NEWS_WHATEVER_THE_PLACEMENT = ("ask", "resync")


@dataclass(slots=True)
class _Session:
    """What the monitor was told, and what it asked for, since the last join."""

    instance: int
    identity: tuple[object, ...]
    holdings: Holdings
    heartbeat: float


class MonitorAgent:
    """Keeps one member known to the monitor, and keeps the member's placement up to date.

    The thread starts at once; it goes on trying while the monitor is away. A second one hears of
    the monitor's events and makes the first report at once. The owner closes the agent. In a forked
    child every method does nothing.

    Args:
        url: The monitor's URL.
        announce: Returns what the member says of itself now; called in the agent's thread, so it
            must be quick: heartbeats wait for it.
        on_placement: Takes each placement that is newer than all before; quick too. Called in the
            agent's thread or in one that calls ``refresh`` or ``offer``, one call at a time.
        on_reply: Takes each answer to a join or heartbeat, after the placement that it names has
            been delivered; quick too, and called in the agent's thread.
        timeout: Bounds each phase of a call to the monitor.
        access: The token to show, and what verifies the monitor's certificate.

    Raises:
        ConfigError: The URL is none, or its certificate could not be verified.
    """

    def __init__(
        self,
        url: str,
        announce: Callable[[], Announcement],
        on_placement: Callable[[Placement], None],
        *,
        on_reply: Callable[[Reply], None] | None = None,
        timeout: timedelta = timedelta(seconds=1),
        access: Access = OPEN,
    ) -> None:
        self.url = url
        self._announce = announce
        self._on_reply = on_reply
        self._on_placement = on_placement
        self._link = MonitorLink(url, timeout, access)
        self._listener = EventListener(MonitorLink(url, timeout, access), self._hear)
        self._known = Known()
        # held while on_placement runs, so that placements arrive in order
        self._delivery = threading.RLock()
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._session: _Session | None = None
        # a life that another one has replaced never pushes that one out again
        self._displaced = False
        self._leaves = True
        self._lease = LEASE.total_seconds()
        self._retry = _FIRST_RETRY
        self._trouble = ""
        self._random = random.Random()
        self._thread = threading.Thread(target=self._run, name="eaas-agent", daemon=True)
        self._thread.start()

    @property
    def known(self) -> Known:
        """The newest placement delivered: its term, its version, and the monitor it came from."""
        return self._known

    @property
    def is_away(self) -> bool:
        """Whether the monitor did not answer, or refused, the last time it was called."""
        return bool(self._trouble)

    def notify(self) -> None:
        """Report now rather than at the next heartbeat, since what is announced has changed."""
        if self._is_here():
            self._wake.set()

    def refresh(self, timeout: timedelta) -> bool:
        """Fetch the placement now, in the caller's thread.

        Args:
            timeout: Bounds each phase of the call, and the wait for a delivery under way.

        Returns:
            Whether the monitor answered; ``on_placement`` has run if its placement was newer.
        """
        if not self._is_here() or self._stopping.is_set():
            return False
        try:
            placement, monitor = self._link.placement(timeout)
            self._deliver(placement, monitor, timeout.total_seconds())
        except TransportError as error:
            logger.debug("no placement fetched: %s", error)
            return False
        return True

    def offer(self, placement: Placement) -> bool:
        """Hand in a placement that came another way, such as from a server.

        Returns:
            Whether it was newer than all before, so that ``on_placement`` was called.
        """
        return self._is_here() and self._deliver(placement, 0, _DELIVERY_SECONDS)

    def close(self, *, leave: bool = True) -> None:
        """Stop, within a second; safe twice.

        Args:
            leave: Whether to leave the cluster; else the monitor finds out when the lease ends.
        """
        if not self._is_here():
            return
        self._leaves = leave
        self._stopping.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _is_here(self) -> bool:
        return os.getpid() == self._pid

    def _run(self) -> None:
        with self._link:
            while not self._stopping.is_set():
                delay = self._turn()
                # one report answers all that happens meanwhile, however many events that are
                rest = min(_REST, delay / 2)
                self._stopping.wait(rest)
                self._wake.wait(delay - rest)
                self._wake.clear()
            self._leave()
        self._listener.close()

    def _hear(self, kind: str, order: tuple[int, int]) -> None:
        """Report now if an event is news."""
        if kind in _NEWS_WHATEVER_THE_PLACEMENT or order > self._known.order:
            self._wake.set()

    def _turn(self) -> float:
        """Report once, fetch what is newer, and return the seconds until the next turn."""
        try:
            delay = self._report(self._announce())
        except (RequestRefused, AccessDenied) as error:
            self._say(str(error), logging.ERROR, "the monitor refuses this member: %s", error)
            # a member whose heartbeat was refused is alive all the same
            delay = self._back_off() if self._session is None else self._session.heartbeat
        except TransportError as error:
            text = "the monitor is away, requests go on without it: %s"
            self._say("away", logging.WARNING, text, error)
            delay = self._back_off()
        except Exception as error:
            # a fault of the member's own callback, which may be sound again next time
            text = "this member's callback failed: %r"
            self._say(repr(error), logging.ERROR, text, error, exc_info=True)
            delay = self._back_off()
        else:
            self._retry = _FIRST_RETRY
        return delay * self._random.uniform(0.75, 1.0)

    def _back_off(self) -> float:
        # a monitor that was only away for a moment must hear from its members within a lease
        self._retry, delay = min(2 * self._retry, _LAST_RETRY, self._lease / 4), self._retry
        return delay

    def _report(self, said: Announcement) -> float:
        session = self._session
        if session is not None and session.identity == said.identity:
            reply = self._beat(said, session)
            if reply.status == "gone":
                self._session, self._displaced = None, True
                text = "another life has taken the place of %s, which waits until the name is free"
                self._say("gone", logging.ERROR, text, said.name)
                return self._lease
            if reply.status == "unknown":
                session = self._session = None
        else:
            session = self._session = None
        if session is None:
            session, reply = self._join(said)
        if reply.order > self._known.order:
            self._deliver(*self._link.placement(), _DELIVERY_SECONDS)
        if self._on_reply is not None:
            self._on_reply(reply)
        if self._trouble:
            logger.warning("the monitor %s knows %s again", self.url, said.name)
            self._trouble = ""
        return session.heartbeat

    def _join(self, said: Announcement) -> tuple[_Session, Reply]:
        known, takeover = self._known.to_json(), not self._displaced
        reply = self._link.report("/join", {**said.to_json(), "known": known, "takeover": takeover})
        self._session = _Session(
            instance=said.instance,
            identity=said.identity,
            holdings=dict(said.holdings),
            heartbeat=max(reply.heartbeat, _SHORTEST_HEARTBEAT),
        )
        self._lease = reply.lease
        self._listener.start(reply.lease)
        return self._session, reply

    def _beat(self, said: Announcement, session: _Session) -> Reply:
        body = {**said.beat_json(), "known": self._known.to_json()}
        holdings = dict(said.holdings)
        if holdings != session.holdings:
            body["holdings"] = holdings_json(holdings)
        reply = self._link.report("/heartbeat", body)
        session.holdings = holdings
        return reply

    def _leave(self) -> None:
        if self._session is None or not self._leaves:
            return
        body = {"instance": instance_text(self._session.instance)}
        try:
            self._link.call("POST", "/leave", body, _LEAVE_TIMEOUT)
        except TransportError as error:
            logger.debug("could not leave: %s", error)

    def _say(self, kind: str, level: int, text: str, *args: object, exc_info: bool = False) -> None:
        """Log a trouble once, until another one or its end."""
        if kind != self._trouble:
            logger.log(level, text, *args, exc_info=exc_info)
        self._trouble = kind

    def _deliver(self, placement: Placement, monitor: int, seconds: float) -> bool:
        """Call ``on_placement`` if a placement is newer than all before; return whether it was."""
        if not self._delivery.acquire(timeout=seconds):
            return False
        try:
            if placement.order <= self._known.order:
                return False
            self._on_placement(placement)
            # afterwards: if the callback fails, the placement is fetched again
            self._known = Known(placement.term, placement.version, monitor)
            return True
        finally:
            self._delivery.release()
