"""Shared memory: client and server are processes on one host; windows are passed as descriptors.

What orders payload before word: on x86-64 stores become visible in program order, and Python's
copies into a window are plain stores. Python has no fence, so other machines are refused.
"""

from __future__ import annotations

import platform

from typing_extensions import override

from torch_eaas.comm.socket_transport import SocketTransport
from torch_eaas.comm.window import Window, WindowMaker, adopt_window, create_window
from torch_eaas.errors import ConfigError


class SharedMemoryTransport(SocketTransport):
    """Windows in anonymous shared memory, control calls over a unix socket.

    Raises:
        ConfigError: The processor may reorder stores (anything but x86-64).
    """

    def __init__(self) -> None:
        machine = platform.machine()
        if machine not in ("x86_64", "AMD64"):
            raise ConfigError(
                f"the shared_memory transport needs x86-64: Python has no memory fence, and on "
                f"{machine} a word could become visible before its payload; use loopback"
            )
        super().__init__(SharedWindows())


class SharedWindows(WindowMaker):
    """Windows of anonymous shared memory."""

    name = "shared_memory"

    @override
    def create(self, nbytes: int) -> Window:
        return create_window(nbytes)

    @override
    def adopt(self, fd: int, nbytes: int) -> Window:
        return adopt_window(fd, nbytes)
