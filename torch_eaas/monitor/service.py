"""The members behind the HTTP routes: a clock, a tick, listeners and the log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable

from torch_eaas.monitor.announcement import Heartbeat, Status
from torch_eaas.monitor.bell import Bell
from torch_eaas.monitor.members import Members
from torch_eaas.monitor.schemas import JoinBody

logger = logging.getLogger(__name__)


class Service:
    """Steps the members with a clock; all calls come from one event loop.

    Args:
        members: The state.
        clock: Monotonic seconds.
        keepalive: Seconds after which a silent event stream sends a comment.
    """

    def __init__(self, members: Members, clock: Callable[[], float], keepalive: float) -> None:
        self.members = members
        self.clock = clock
        self.bell = Bell()
        self._keepalive = keepalive
        self._announced = members.log.last

    def join(self, body: JoinBody) -> None:
        """Take in a member; ConfigError if it is refused."""
        try:
            self.members.join(
                body.value(), body.known.value(), self.clock(), takeover=body.takeover
            )
        finally:
            self._tell()

    def heartbeat(self, beat: Heartbeat) -> Status:
        """Renew a member's lease."""
        try:
            return self.members.heartbeat(beat, self.clock())
        finally:
            self._tell()

    def leave(self, instance: int) -> bool:
        """Take a member out."""
        left = self.members.leave(instance, self.clock())
        self._tell()
        return left

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(self.members.tick_seconds)
            try:
                self.members.tick(self.clock())
                self._tell()
            except Exception:
                # without ticks no lease would ever end, so one that fails must not be the last
                logger.exception("a tick of the monitor failed")

    async def stream(self, last_id: str) -> AsyncIterator[str]:
        """Yield events in the form of Server-Sent Events until the monitor stops.

        Args:
            last_id: The id to resume after; where that cannot be done, the stream starts now with
                a ``resync`` event, upon which a listener fetches what it wants to know.
        """
        log = self.members.log
        resumed = log.resume(last_id)
        cursor = log.last if resumed is None else resumed
        if resumed is None:
            yield self._resync()
        while not self.bell.stopped:
            if log.resume(log.event_id(cursor)) is None:
                # a listener that reads too slowly for the log
                cursor = log.last
                yield self._resync()
            for event in log.since(cursor):
                cursor = event.number
                yield _frame(log.event_id(cursor), event.kind, event.to_json())
            if cursor == log.last and not await self.bell.wait(self._keepalive):
                yield ": keepalive\n\n"

    def _resync(self) -> str:
        term, version = self.members.placement.order
        log = self.members.log
        text = "earlier events are not told"
        data = {"kind": "resync", "text": text, "term": term, "version": version}
        return _frame(log.event_id(log.last), "resync", data)

    def _tell(self) -> None:
        """Pass new events to the listeners and the log."""
        events = self.members.log.since(self._announced)
        if not events:
            return
        self._announced = events[-1].number
        for event in events:
            logger.info("%s", event.text)
        self.bell.ring()


def _frame(event_id: str, kind: str, data: dict[str, object]) -> str:
    return f"id: {event_id}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"
