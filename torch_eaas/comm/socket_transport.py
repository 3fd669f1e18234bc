"""What transports between processes share: control calls over a socket, and how to wait."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from typing_extensions import override

from torch_eaas.access import OPEN, Access
from torch_eaas.comm import tcp_sockets, unix_sockets
from torch_eaas.comm.control_endpoint import ControlEndpoint
from torch_eaas.comm.control_link import ControlLink
from torch_eaas.comm.door import Door
from torch_eaas.comm.polling import Poller
from torch_eaas.comm.transport import Handler, Link, Listener, Transport
from torch_eaas.comm.window import Window, WindowMaker
from torch_eaas.errors import ConfigError


class SocketTransport(Transport):
    """Control calls over a unix socket; over TCP too, where windows need no descriptor.

    Args:
        windows: Makes windows, and takes in those that a peer sends.
    """

    def __init__(self, windows: WindowMaker) -> None:
        self._windows = windows
        self._poller = Poller()

    @override
    def create_window(self, nbytes: int) -> Window:
        return self._windows.create(nbytes)

    @override
    def listen(self, address: str, handler: Handler, access: Access = OPEN) -> Listener:
        address = address or f"{unix_sockets.PREFIX}@torch-eaas-{secrets.token_hex(8)}"
        door: Door
        if self._is_tcp(address):
            door = tcp_sockets.TcpDoor(address, access)
        else:
            door = unix_sockets.UnixDoor(address)
        return ControlEndpoint(door, handler, self._windows)

    @override
    def dial(self, address: str, timeout: float, access: Access = OPEN) -> Link:
        if self._is_tcp(address):
            connection = tcp_sockets.connect_tcp(address, timeout, access)
        else:
            connection = unix_sockets.connect_unix(address, timeout)
        return ControlLink(connection, address, access.token, self._windows)

    def _is_tcp(self, address: str) -> bool:
        """Return whether an address is one of TCP; ConfigError if no window could follow."""
        if not tcp_sockets.is_tcp(address):
            return False
        if not self._windows.in_words:
            raise ConfigError(
                f"{address}: windows of {self._windows.name} are passed as descriptors, which "
                f"reach processes of one host: use a unix: address, or NvshmemTransport, whose "
                f"windows cross hosts"
            )
        return True

    @override
    def ring(self) -> None:
        pass

    @override
    def wait(
        self,
        ready: Callable[[], bool],
        timeout: float,
        waited: float = 0.0,
        *,
        quiet: float = 0.0,
    ) -> bool:
        return self._poller.wait(ready, timeout, waited, quiet)
