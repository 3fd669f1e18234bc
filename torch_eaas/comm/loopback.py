"""Loopback: client and server are threads of one process; for tests, tutorials and notebooks.

Threads share the interpreter's lock, so waiting is a condition variable: two spinning threads
would take 16 ms a round trip.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from typing_extensions import override

from torch_eaas.access import DENIED, OPEN, Access
from torch_eaas.comm.tcp_sockets import is_tcp
from torch_eaas.comm.transport import Handler, Json, Link, Listener, Transport
from torch_eaas.comm.window import Window, local_window
from torch_eaas.errors import AccessDenied, ConfigError, EaasError, HandshakeRefused, PeerGone

PREFIX = "loopback:"


class LoopbackTransport(Transport):
    """Connects the clients and servers that were given this very object."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._listeners: dict[str, _LoopbackListener] = {}
        self._numbers = itertools.count(1)

    @override
    def create_window(self, nbytes: int) -> Window:
        return local_window(nbytes)

    @override
    def listen(self, address: str, handler: Handler, access: Access = OPEN) -> Listener:
        address = address or f"{PREFIX}server-{next(self._numbers)}"
        _check_near(address)
        if not address.startswith(PREFIX):
            raise ConfigError(f"a loopback address is {PREFIX}name, got {address!r}")
        with self._changed:
            if address in self._listeners:
                raise ConfigError(f"{address} is taken by another server of this transport")
            listener = _LoopbackListener(self, address, handler)
            self._listeners[address] = listener
        return listener

    @override
    def dial(self, address: str, timeout: float, access: Access = OPEN) -> Link:
        _check_near(address)
        with self._changed:
            listener = self._listeners.get(address)
            if listener is None:
                raise PeerGone(f"nobody listens at {address}")
            # under the lock, so that a listener which closes now ends this link too
            return _LoopbackLink(self, listener, next(self._numbers), access.token)

    @override
    def ring(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @override
    def wait(
        self,
        ready: Callable[[], bool],
        timeout: float,
        waited: float = 0.0,
        *,
        quiet: float = 0.0,
    ) -> bool:
        with self._changed:
            return self._changed.wait_for(ready, max(0.0, timeout + quiet))

    def forget(self, address: str) -> None:
        """Take a listener that was closed off the list."""
        with self._changed:
            self._listeners.pop(address, None)
            self._changed.notify_all()


def _check_near(address: str) -> None:
    if is_tcp(address):
        raise ConfigError(
            f"{address}: loopback joins threads of one process; between hosts use NvshmemTransport"
        )


class _LoopbackListener(Listener):
    def __init__(self, transport: LoopbackTransport, address: str, handler: Handler) -> None:
        self._transport = transport
        self._address = address
        self.handler = handler
        self.closed = False
        self.peers: set[int] = set()

    @property
    @override
    def address(self) -> str:
        return self._address

    @override
    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._transport.forget(self._address)
            peers, self.peers = self.peers, set()
            for peer in peers:
                self.handler.gone(peer)

    def end(self, peer: int) -> None:
        """End one connection, as often as it is asked."""
        if peer in self.peers:
            self.peers.discard(peer)
            self.handler.gone(peer)


class _LoopbackLink(Link):
    def __init__(
        self, transport: LoopbackTransport, listener: _LoopbackListener, peer: int, token: str
    ) -> None:
        self._transport = transport
        self._listener = listener
        self._peer = peer
        self._token = token
        listener.peers.add(peer)

    @override
    def call(
        self, verb: str, body: Json, windows: Sequence[Window] = (), *, timeout: float
    ) -> tuple[Json, list[Window]]:
        if self.closed:
            raise PeerGone(f"the server at {self._listener.address} has closed")
        if not self._listener.handler.admits(self._peer, self._token):
            raise AccessDenied(f"{self._listener.address}: {DENIED}")
        try:
            answer, returned = self._listener.handler.handle(self._peer, verb, body, windows)
        except EaasError as error:
            raise HandshakeRefused(f"{self._listener.address}: {error}") from error
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise HandshakeRefused(f"{self._listener.address}: {text}") from error
        self._transport.ring()
        return answer, list(returned)

    @property
    @override
    def closed(self) -> bool:
        return self._peer not in self._listener.peers

    @override
    def close(self) -> None:
        self._listener.end(self._peer)
        self._transport.ring()
