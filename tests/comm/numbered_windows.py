"""Windows that are told in words: they stand for memory that crosses hosts, over real TCP."""

from __future__ import annotations

import itertools
import socket
from typing import Any

from typing_extensions import override

from tests.comm.transport_contract import TIMEOUT_S
from torch_eaas.access import OPEN, Access
from torch_eaas.comm.socket_transport import SocketTransport
from torch_eaas.comm.tcp_sockets import host_and_port
from torch_eaas.comm.transport import Handler, Link, Listener
from torch_eaas.comm.window import Memory, Window, WindowMaker, local_window
from torch_eaas.errors import TransportError

ANY_PORT = "tcp://127.0.0.1:0"


class NumberedWindow(Window):
    """A window of this process that is told by its number."""

    def __init__(self, number: int, inner: Window) -> None:
        self.number, self.nbytes = number, inner.nbytes
        self._inner = inner
        self._is_closed = False

    @property
    @override
    def view(self) -> memoryview:
        return self._inner.view

    @property
    @override
    def memory(self) -> Memory:
        if self._is_closed:
            raise TransportError("this window is closed")
        return self._inner.memory

    @property
    @override
    def fd(self) -> int:
        raise TransportError("this window has no file descriptor")

    @override
    def close(self) -> None:
        self._is_closed = True


class NumberedWindows(WindowMaker):
    """Stands for memory that crosses hosts: ends of this process find it by its number."""

    name = "numbered"
    in_words = True

    def __init__(self) -> None:
        self.made: dict[int, Window] = {}
        self._numbers = itertools.count()

    @override
    def create(self, nbytes: int) -> Window:
        number = next(self._numbers)
        self.made[number] = local_window(nbytes)
        return NumberedWindow(number, self.made[number])

    @override
    def tell(self, window: Window) -> Any:
        assert isinstance(window, NumberedWindow)
        return window.number

    @override
    def adopt(self, fd: int, told: Any) -> Window:
        assert fd == -1
        if type(told) is not int or told not in self.made:
            raise TransportError(f"there is no window {told!r}")
        return NumberedWindow(told, self.made[told])


class TcpByDefault(SocketTransport):
    """Where the contract gives no address and no access, these are taken."""

    def __init__(self, windows: WindowMaker, server: Access, client: Access) -> None:
        super().__init__(windows)
        self._server, self._client = server, client

    @override
    def listen(self, address: str, handler: Handler, access: Access = OPEN) -> Listener:
        return super().listen(address or ANY_PORT, handler, self._server)

    @override
    def dial(self, address: str, timeout: float, access: Access = OPEN) -> Link:
        authority = self._client.tls_authority
        return super().dial(address, timeout, Access(token=access.token, tls_authority=authority))


def dial_by_hand(address: str) -> socket.socket:
    """Return a connection that sends what it likes."""
    return socket.create_connection(host_and_port(address), TIMEOUT_S)
