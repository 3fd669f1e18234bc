"""The transport seam: control calls, windows, and how to wait for a word.

An address names a transport and a control endpoint: ``loopback:name`` for threads of one process,
``unix:/path`` or ``unix:@name`` for processes on one host, ``tcp://HOST:PORT`` or
``tls://HOST:PORT`` between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch_eaas.access import OPEN, Access
from torch_eaas.comm.window import Window

Json = dict[str, Any]
Reply = tuple[Json, Sequence[Window]]


class Handler(Protocol):
    """What answers control calls on the server's side."""

    def admits(self, peer: int, token: object) -> bool:
        """Return whether a call that came with ``token`` may go on; asked before ``handle``."""
        ...

    def handle(self, peer: int, verb: str, body: Json, windows: Sequence[Window]) -> Reply:
        """Answer one call of the control connection ``peer``; an EaasError becomes its text."""
        ...

    def gone(self, peer: int) -> None:
        """Note that the control connection ``peer`` has ended."""
        ...


class Link(Protocol):
    """A client's control connection to one server."""

    def call(
        self, verb: str, body: Json, windows: Sequence[Window] = (), *, timeout: float
    ) -> tuple[Json, list[Window]]:
        """Call the server and return its answer.

        Raises:
            AccessDenied: The server asks for another token.
            HandshakeRefused: The server answered with an error.
            PeerTimeout: It did not answer within ``timeout`` seconds.
            PeerGone: The connection has ended.
        """
        ...

    @property
    def closed(self) -> bool:
        """Whether the server's process has ended or closed the connection."""
        ...

    def close(self) -> None:
        """End the connection; safe twice."""
        ...


class Listener(Protocol):
    """A server's control endpoint."""

    @property
    def address(self) -> str:
        """Where clients reach it."""
        ...

    def close(self) -> None:
        """Take no more connections and end those there are; safe twice."""
        ...


class Transport(Protocol):
    """How bytes and control calls reach a peer. Payload before word is the transport's duty."""

    def create_window(self, nbytes: int) -> Window:
        """Return a new zeroed window that can be passed in a call."""
        ...

    def listen(self, address: str, handler: Handler, access: Access = OPEN) -> Listener:
        """Answer control calls at ``address`` (empty: one of the transport's choice, local).

        ``handler`` asks for the token; without one in ``access`` nobody beyond this machine is
        answered. Its certificate is shown where the address is one of TCP.

        Raises:
            ConfigError: The address is none of this transport's, or cannot be listened at.
        """
        ...

    def dial(self, address: str, timeout: float, access: Access = OPEN) -> Link:
        """Open a control connection within ``timeout`` seconds; the token goes with each call.

        Raises:
            ConfigError: The address is none of this transport's.
            AccessDenied: Somebody listens there who must not be told the token.
            PeerGone: Nobody listens there.
        """
        ...

    def ring(self) -> None:
        """Wake whoever waits in this process: words were stored. Free where waiting polls."""
        ...

    def wait(
        self,
        ready: Callable[[], bool],
        timeout: float,
        waited: float = 0.0,
        *,
        quiet: float = 0.0,
    ) -> bool:
        """Wait until ``ready()`` or until ``timeout`` seconds have passed; return which.

        ``waited`` is how long the caller has waited already: a fresh wait polls, a long one
        sleeps longer between looks. ``quiet`` is how long nothing is to be expected at first;
        it does not count towards ``timeout``.
        """
        ...
