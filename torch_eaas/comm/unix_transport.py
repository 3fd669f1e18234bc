"""What transports of one host share: control calls over a unix socket, and how to wait."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from typing_extensions import override

from torch_eaas.comm.control_endpoint import ControlEndpoint
from torch_eaas.comm.polling import Poller
from torch_eaas.comm.transport import Handler, Link, Listener, Transport
from torch_eaas.comm.unix_link import UnixLink
from torch_eaas.comm.unix_sockets import PREFIX
from torch_eaas.comm.window import Window, WindowMaker


class UnixTransport(Transport):
    """Control calls over a unix socket; windows are passed as descriptors.

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
    def listen(self, address: str, handler: Handler) -> Listener:
        address = address or f"{PREFIX}@torch-eaas-{secrets.token_hex(8)}"
        return ControlEndpoint(address, handler, self._windows)

    @override
    def dial(self, address: str, timeout: float, token: str = "") -> Link:
        return UnixLink(address, timeout, token, self._windows)

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
