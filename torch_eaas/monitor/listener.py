"""A member's ear for the monitor's events, which heartbeats would tell half a second later."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch_eaas.errors import TransportError
from torch_eaas.monitor.link import MonitorLink

logger = logging.getLogger(__name__)

LONGEST_EVENT = 1 << 16
"""Bytes; a monitor's events are lines of text for people and two numbers."""

_FIRST_RETRY = 0.1
_LAST_RETRY = 2.0
_CLOSE_S = 0.5
_ID = re.compile(r"[0-9a-f]{16}-[0-9]{1,18}")


class Heard(NamedTuple):
    """One event."""

    id: str
    """Where to go on from after a break."""
    kind: str
    """See ``events.Event``; ``resync`` where earlier ones are lost."""
    order: tuple[int, int]
    """Term and version of the placement at that time."""


class EventListener:
    """Keeps a monitor's event stream open in a thread; when it breaks, opens it again later.

    Nothing depends on it: whatever goes wrong here is told by the next heartbeat's failure.

    Args:
        link: Calls the monitor; the listener closes it.
        on_event: Takes an event's kind and the placement's order at that time. Called in the
            thread; quick.
    """

    def __init__(self, link: MonitorLink, on_event: Callable[[str, tuple[int, int]], None]) -> None:
        self._link = link
        self._on_event = on_event
        self._silence = 0.0
        self._last_id = ""
        self._retry = _FIRST_RETRY
        self._random = random.Random()
        self._stopping = threading.Event()
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self, silence: float) -> None:
        """Listen from now on, or go on so.

        Args:
            silence: Seconds after which a monitor that sends nothing counts as away.
        """
        self._silence = silence
        if self._thread is None and not self._stopping.is_set():
            self._thread = threading.Thread(target=self._run, name="eaas-events", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Hang up and end the thread, within half a second; safe twice."""
        self._stopping.set()
        self._hang_up()
        if self._thread is None:
            self._link.close()
        else:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with self._link:
            while not self._stopping.is_set():
                try:
                    self._listen()
                except Exception as error:
                    # no matter what it is: heartbeats fail too if it is serious, and are told of
                    logger.debug("the event stream of %s broke: %r", self._link.url, error)
                self._retry, delay = min(2 * self._retry, _LAST_RETRY), self._retry
                self._stopping.wait(delay * self._random.uniform(0.5, 1.0))

    def _listen(self) -> None:
        """Listen until the stream ends or breaks."""
        with self._link.events(self._last_id, self._silence, self._trace) as pieces:
            for event in read_events(pieces):
                if self._stopping.is_set():
                    break
                self._last_id, self._retry = event.id, _FIRST_RETRY
                self._on_event(event.kind, event.order)

    def _trace(self, name: str, info: dict[str, Any]) -> None:
        """Keep each new connection's socket, by which another thread can hang up."""
        if name.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")
            if self._stopping.is_set():
                self._hang_up()

    def _hang_up(self) -> None:
        """End the wait of a thread that reads; closing the socket would not."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # not SSLSocket's own, which takes the session away from the thread that reads
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def read_events(pieces: Iterable[bytes]) -> Iterator[Heard]:
    """Yield the events of a stream in the form of Server-Sent Events, however it is cut.

    Raises:
        TransportError: It is no monitor's stream.
    """
    rest = b""
    for piece in pieces:
        *blocks, rest = (rest + piece).split(b"\n\n")
        for block in blocks:
            # what begins with a colon is a comment: the monitor lives
            if block and not block.startswith(b":"):
                yield _event(block)
        if len(rest) > LONGEST_EVENT:
            raise TransportError(f"an event of a monitor has at most {LONGEST_EVENT} bytes")


def _event(block: bytes) -> Heard:
    try:
        lines = block.decode().split("\n")
        fields = dict(line.split(": ", 1) for line in lines)
        data = json.loads(fields["data"])
        heard = Heard(fields["id"], fields["event"], (int(data["term"]), int(data["version"])))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TransportError(f"not an event of a monitor: {block[:80]!r}") from error
    if not _ID.fullmatch(heard.id):
        raise TransportError(f"not the id of an event: {heard.id[:80]!r}")
    return heard
