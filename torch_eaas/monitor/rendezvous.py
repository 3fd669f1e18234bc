"""A meeting place: one process leaves a few bytes under a name, others come for them.

What NVSHMEM's processes must know of each other before they can start goes this way.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from datetime import timedelta

from torch_eaas.errors import AccessDenied, ConfigError, PeerGone, PeerTimeout
from torch_eaas.monitor.link import MonitorLink

MAX_BYTES = 4096
MAX_NAMES = 64
FORGOTTEN_S = 600.0
LOOK_S = 0.1
"""How often a member asks whether what it waits for has come."""


class Rendezvous:
    """What was left, and when. A name is not given away twice before it is forgotten.

    Example:
        ``put("job-7", b"id", 0.0)``; ``get("job-7", 1.0)`` is ``b"id"``, and None after 600 s.
    """

    def __init__(self) -> None:
        self._left: dict[str, tuple[bytes, float]] = {}

    def put(self, name: str, data: bytes, now: float) -> None:
        """Leave bytes under a name; the same bytes once more are no fault.

        Raises:
            ConfigError: Others lie there, or there are too many names.
        """
        self._forget(now)
        if self._left.get(name, (data,))[0] != data:
            raise ConfigError(
                f"{name!r} is taken: whoever came before would meet the wrong ones; "
                f"give each start a name of its own, or wait {FORGOTTEN_S:g} s"
            )
        if name not in self._left and len(self._left) >= MAX_NAMES:
            raise ConfigError(
                f"{MAX_NAMES} names are taken; each is forgotten after {FORGOTTEN_S:g} s"
            )
        self._left[name] = (data, now)

    def get(self, name: str, now: float) -> bytes | None:
        """Return what lies under a name, or None."""
        self._forget(now)
        return self._left.get(name, (None,))[0]

    def _forget(self, now: float) -> None:
        for name, (_, put_at) in list(self._left.items()):
            if now - put_at > FORGOTTEN_S:
                del self._left[name]


def leave(link: MonitorLink, name: str, data: bytes) -> None:
    """Leave bytes at a monitor for the others of this name.

    Raises:
        ConfigError: There are more than 4096 bytes.
        RequestRefused: Others lie there, or the name is none; see the message.
        TransportError: The monitor cannot be reached, or did not answer.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"a rendezvous holds at most {MAX_BYTES} bytes, got {len(data)}")
    link.call("PUT", f"/rendezvous/{name}", {"data": base64.b64encode(data).decode()})


def exchange_at(
    link: MonitorLink, name: str, timeout: timedelta, *, who: str
) -> Callable[[bytes | None], bytes]:
    """Return how PE 0 hands its id to the others, as ``NvshmemWorld.open`` takes it.

    Args:
        link: The monitor.
        name: Where to meet: the same for all of one start, and for no other.
        timeout: How long the others wait for PE 0.
        who: This process, for messages.
    """

    def exchange(made: bytes | None) -> bytes:
        if made is None:
            return wait_for(link, name, timeout, who=who, whom="PE 0")
        leave(link, name, made)
        return made

    return exchange


def wait_for(link: MonitorLink, name: str, timeout: timedelta, *, who: str, whom: str) -> bytes:
    """Return what somebody leaves under a name; while the monitor is away, it is asked again.

    Args:
        link: The monitor.
        name: Where to meet.
        timeout: How long to wait.
        who: The waiting process, for the message.
        whom: Who is to leave it, for the message.

    Raises:
        PeerTimeout: Nobody has left anything in time.
        AccessDenied: The monitor asks for another token.
        RequestRefused: The name is none.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    trouble = "the monitor answered, and nothing lay there"
    while True:
        try:
            data = link.call("GET", f"/rendezvous/{name}").get("data")
            if isinstance(data, str):
                return base64.b64decode(data)
        except AccessDenied:
            raise
        except (PeerGone, PeerTimeout) as error:
            trouble = str(error)
        if time.monotonic() >= deadline:
            raise PeerTimeout(
                f"{who} waited {timeout.total_seconds():g} s at {link.url} for what {whom} leaves "
                f"under {name!r}: {trouble}; has it started, and with the same name?"
            )
        time.sleep(LOOK_S)
