"""Unix sockets: their addresses, who listens and calls there, and which users one talks to."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from typing_extensions import override

from torch_eaas.comm.door import Door
from torch_eaas.errors import AccessDenied, ConfigError, PeerGone

PREFIX = "unix:"


def socket_name(address: str) -> str:
    """Return the kernel's name for ``unix:/path`` or ``unix:@name`` (abstract: no file)."""
    name = address.removeprefix(PREFIX)
    # a peer may have named it: zeros and lone surrogates would be errors of the socket module
    is_name = address.startswith(PREFIX) and len(name) > 1 and name[0] in "@/"
    if not is_name or not name.isprintable():
        raise ConfigError(f"an address is unix:/path or unix:@name, got {address!r}")
    if len(name.encode()) > 107:
        raise ConfigError(f"a unix socket's name has at most 107 bytes: {address!r}")
    return "\0" + name[1:] if name[0] == "@" else name


def bind(address: str) -> socket.socket:
    """Return a socket that listens at an address; ConfigError if that cannot be."""
    name = socket_name(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen at {address}: {error}; "
            f"if no server runs there, remove the file or choose another address"
        ) from error
    return sock


def connect_unix(address: str, timeout: float) -> socket.socket:
    """Return a connection to the own user's process at an address.

    Raises:
        ConfigError: The address is none.
        PeerGone: Nobody listens there.
        AccessDenied: Another user does.
    """
    name = socket_name(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(name)
    except OSError as error:
        sock.close()
        raise PeerGone(f"nobody answers at {address}: {error}") from error
    if not is_own_user(sock):
        # anybody may take an abstract name that is free, and would be told the token
        sock.close()
        raise AccessDenied(f"{address} belongs to another user; only one's own is asked")
    return sock


class UnixDoor(Door):
    """Takes connections of the own user (and root) at a unix socket.

    Args:
        address: Where it listens.

    Raises:
        ConfigError: That cannot be.
    """

    is_local = True

    def __init__(self, address: str) -> None:
        self.address = address
        self.listening = bind(address)

    @override
    def take(self, connection: socket.socket) -> socket.socket:
        return connection

    @override
    def greet(self, connection: socket.socket) -> None:
        if not is_own_user(connection):
            raise PeerGone("it belongs to another user")

    @override
    def close(self) -> None:
        self.listening.close()
        if self.address.startswith(f"{PREFIX}/"):
            with contextlib.suppress(OSError):
                os.unlink(socket_name(self.address))


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the peer runs as this user, or as root: nobody else gets a window."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", data)
    return uid in (os.geteuid(), 0)
