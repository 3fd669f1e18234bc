"""TCP for control calls between hosts: addresses, TLS, who may listen where, and a host's end.

``tcp://HOST:PORT`` is plain and ``tls://HOST:PORT`` encrypted; a host is a name or an address (IPv6
in brackets). No user is known here, as on a unix socket: whoever has the token is admitted.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
import time
from typing import Any

from typing_extensions import override

from torch_eaas.access import Access, check_reach
from torch_eaas.comm.door import Door
from torch_eaas.comm.frames import FRAME_TIMEOUT_S
from torch_eaas.comm.tls import client_context, server_context
from torch_eaas.errors import AccessDenied, ConfigError, PeerGone

TCP, TLS = "tcp://", "tls://"

# a host that has lost its power or its network sends no end
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
    # without it an answer may wait 40 ms for a delayed acknowledgement
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)

_ADDRESS = re.compile(
    r"(?:tcp|tls)://(?:\[([0-9A-Fa-f:.]+)\]|([0-9A-Za-z][0-9A-Za-z._-]*)):([0-9]{1,5})"
)


def is_tcp(address: str) -> bool:
    """Return whether an address is meant to be one that other hosts may call."""
    return address.startswith((TCP, TLS))


def host_and_port(address: str) -> tuple[str, int]:
    """Return what an address names; ConfigError if it is none."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[3]) > 65535:
        raise ConfigError(f"an address is tcp://HOST:PORT or tls://HOST:PORT, got {address!r}")
    return match[1] or match[2], int(match[3])


def connect_tcp(address: str, timeout: float, access: Access) -> socket.socket:
    """Return a connection to an address; over TLS, the server has shown its certificate.

    The system's own deadline holds for looking up a name, ``timeout`` for all that follows.

    Raises:
        ConfigError: The address is none, or nothing would be verified though there is an authority.
        AccessDenied: Another answers than the address names, and is told nothing.
        PeerGone: Nobody answers there.
    """
    host, port = host_and_port(address)
    context = _verifier(address, access)
    fault: Exception | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        deadline = time.monotonic() + timeout
        for family, kind, protocol, _, where in found:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            sock = socket.socket(family, kind, protocol)
            try:
                return _call(sock, where, deadline, context, host)
            except OSError as error:
                sock.close()
                if isinstance(error, ssl.SSLCertVerificationError):
                    raise AccessDenied(
                        f"{address}: is told no token: {error}; --tls-authority, in Python "
                        f"tls_authority, names what verifies it"
                    ) from error
                fault = error
    except (OSError, UnicodeError) as error:
        # a name may be none that can be looked up
        fault = error
    raise PeerGone(f"nobody answers at {address}: {fault or 'no time left'}") from fault


def _call(
    sock: socket.socket, where: Any, deadline: float, context: ssl.SSLContext | None, host: str
) -> socket.socket:
    _keep_alive(sock)
    sock.settimeout(max(1e-3, deadline - time.monotonic()))
    sock.connect(where)
    if context is None:
        return sock
    sock.settimeout(max(1e-3, deadline - time.monotonic()))
    return context.wrap_socket(sock, server_hostname=host)


def _verifier(address: str, access: Access) -> ssl.SSLContext | None:
    if address.startswith(TLS):
        return client_context(access.tls_authority, f"{address}'s")
    if access.tls_authority is not None:
        raise ConfigError(
            f"{address}: is no tls://, so {access.tls_authority} would verify nothing and the "
            f"token would be sent in the clear; give the server tls_certificate and tls_key, or "
            f"this end no tls_authority"
        )
    return None


class TcpDoor(Door):
    """Takes connections from wherever its address is reached.

    Args:
        address: Where it listens; port 0 takes a free one. Clients call the host as it is given
            here, so it is a name or an address that they know this machine by.
        access: The token without which nobody listens beyond this machine, and the certificate:
            with one, TLS is spoken and the address begins with ``tls://``.

    Raises:
        ConfigError: That cannot be; says why, and what to do.
    """

    is_local = False

    def __init__(self, address: str, access: Access) -> None:
        host, port = host_and_port(address)
        self._context = server_context(access, f"the server at {address}")
        if self._context is None and address.startswith(TLS):
            raise ConfigError(
                f"{address} needs a certificate: give tls_certificate and tls_key, or listen at "
                f"{TCP}"
            )
        self.listening = _bind(address, host, port, access)
        scheme = TCP if self._context is None else TLS
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{scheme}{shown}:{self.listening.getsockname()[1]}"

    @override
    def take(self, connection: socket.socket) -> socket.socket:
        _keep_alive(connection)
        if self._context is None:
            return connection
        return self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    @override
    def greet(self, connection: socket.socket) -> None:
        if not isinstance(connection, ssl.SSLSocket):
            return
        connection.settimeout(FRAME_TIMEOUT_S)
        try:
            connection.do_handshake()
        except (OSError, ValueError) as error:
            raise PeerGone(f"it does not speak TLS with this server: {error}") from error

    @override
    def close(self) -> None:
        self.listening.close()


def _bind(address: str, host: str, port: int, access: Access) -> socket.socket:
    try:
        (family, kind, protocol, _, where), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
        number = str(where[0])
        if ipaddress.ip_address(number).is_unspecified:
            raise ConfigError(
                f"{address} names no host that clients could call: give the name or address by "
                f"which they know this machine, {TCP}HOST:{port}"
            )
        check_reach(access, number, who="the server", told=address, option="--address")
        sock = socket.socket(family, kind, protocol)
        try:
            # where a server has ended lately its port is free all the same
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(128)
        except OSError:
            sock.close()
            raise
        return sock
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen at {address}: {error}") from error


def _keep_alive(sock: socket.socket) -> None:
    for level, option, value in _KEEP_ALIVE:
        sock.setsockopt(level, option, value)
