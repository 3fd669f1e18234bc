"""Sockets, signals and uvicorn: how the monitor's application is served and stopped."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from torch_eaas.access import check_reach
from torch_eaas.config import MonitorConfig
from torch_eaas.errors import ConfigError, TransportError
from torch_eaas.monitor.tls import check_certificate


def open_socket(config: MonitorConfig) -> socket.socket:
    """Bind and return a socket, which the server keeps, so that nobody else can take the port.

    Raises:
        ConfigError: The address cannot be bound, or not without a token, or the certificate is bad.
    """
    check_certificate(config.access)
    host, port = config.host, config.port
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        check_reach(config.access, str(address[0]), who="the monitor", told=host, option="--host")
        # asyncio sets TCP_NODELAY only where the socket says that it is TCP; without it each
        # answer waits 40 ms for a delayed acknowledgement
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1024)
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise ConfigError(f"the monitor cannot listen on {host}:{port}: {error}") from error


def url_of(sock: socket.socket, config: MonitorConfig) -> str:
    """Return the URL under which this machine reaches a socket."""
    scheme = "http" if config.access.tls_certificate is None else "https"
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        address = ipaddress.ip_address("::1" if address.version == 6 else "127.0.0.1")
    name = f"[{address}]" if address.version == 6 else str(address)
    return f"{scheme}://{name}:{port}"


class MonitorServer(uvicorn.Server):
    """A uvicorn server that ends with its event streams, and whose signals end in a return.

    Args:
        config: Names the certificate, if there is one.
        app: The application.
        on_started: Called once requests are answered and signals handled.
        on_stopping: Called in the event loop when the server begins to stop.
    """

    def __init__(
        self,
        config: MonitorConfig,
        app: ASGIApp,
        on_started: Callable[[], None],
        on_stopping: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=1,
                ssl_certfile=config.access.tls_certificate,
                ssl_keyfile=config.access.tls_key,
            )
        )
        self._on_started = on_started
        self._on_stopping = on_stopping

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so; TransportError if the application does not."""
        try:
            await super().startup(sockets)
        except SystemExit as error:
            raise TransportError("the monitor did not start; its log says why") from error
        self._on_started()

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the event streams, for which uvicorn would wait."""
        self._on_stopping()
        await super().shutdown(sockets)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, at once at the second."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle SIGINT and SIGTERM without raising them again, so that the exit code is 0."""
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM):
                # only the main thread may; a monitor in the background is closed by its handle
                with contextlib.suppress(ValueError):
                    stack.callback(signal.signal, number, signal.signal(number, self.handle_exit))
            yield


class BodyLimit:
    """Refuses request bodies above a size with status 413.

    Args:
        app: The application behind it.
        max_bytes: The largest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        left = self._max_bytes

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"a request body may have {self._max_bytes} bytes")
            return message

        await self._app(scope, counted if scope["type"] == "http" else receive, send)
