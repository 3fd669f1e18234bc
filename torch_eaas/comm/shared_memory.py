"""Shared memory: client and server are processes on one host; windows are passed as descriptors.

What orders payload before word: on x86-64 stores become visible in program order, and Python's
copies into a window are plain stores. Python has no fence, so other machines are refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from torch_eaas.comm.frames import receive_frame, send_frame
from torch_eaas.comm.polling import Poller
from torch_eaas.comm.transport import Handler, Json, Link, Listener, Transport
from torch_eaas.comm.window import Window, adopt_window, create_window
from torch_eaas.errors import (
    ConfigError,
    EaasError,
    HandshakeRefused,
    PeerGone,
    PeerTimeout,
    TransportError,
)

PREFIX = "unix:"
MAX_CONNECTIONS = 1024
SEND_TIMEOUT_S = 5.0
CLOSE_S = 1.0

logger = logging.getLogger(__name__)


class SharedMemoryTransport(Transport):
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
        self._poller = Poller()

    @override
    def create_window(self, nbytes: int) -> Window:
        return create_window(nbytes)

    @override
    def listen(self, address: str, handler: Handler) -> Listener:
        address = address or f"{PREFIX}@torch-eaas-{secrets.token_hex(8)}"
        return _SharedMemoryListener(address, handler)

    @override
    def dial(self, address: str, timeout: float) -> Link:
        return _SharedMemoryLink(address, timeout)

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


def socket_name(address: str) -> str:
    """Return the kernel's name for ``unix:/path`` or ``unix:@name`` (abstract: no file)."""
    name = address.removeprefix(PREFIX)
    if not address.startswith(PREFIX) or len(name) < 2 or name[0] not in "@/":
        raise ConfigError(f"a shared_memory address is unix:/path or unix:@name, got {address!r}")
    if len(name.encode()) > 107:
        raise ConfigError(f"a unix socket's name has at most 107 bytes: {address!r}")
    return "\0" + name[1:] if name[0] == "@" else name


class _SharedMemoryListener(Listener):
    def __init__(self, address: str, handler: Handler) -> None:
        self._address = address
        self._handler = handler
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._socket = _bind(address)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="eaas-control", daemon=True)
        self._thread.start()

    @property
    @override
    def address(self) -> str:
        return self._address

    @override
    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # the address is taken until the thread has left the kernel
        self._thread.join(SEND_TIMEOUT_S)
        self._socket.close()
        if self._address.startswith(f"{PREFIX}/"):
            with contextlib.suppress(OSError):
                os.unlink(socket_name(self._address))
        with self._lock:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            threads = list(self._threads.values())
        # a thread that still lets go of windows when the interpreter ends would end it hard
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_S)

    def _accept(self) -> None:
        peer = 0
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._closed:
                    logger.warning("control endpoint %s: accept failed: %s", self._address, error)
                    time.sleep(0.1)
                continue
            if not _is_own_user(connection) or len(self._connections) >= MAX_CONNECTIONS:
                connection.close()
                continue
            peer += 1
            # a thread each: a client that stops halfway through a frame holds up nobody
            thread = threading.Thread(
                target=self._serve, args=(peer, connection), name="eaas-control", daemon=True
            )
            with self._lock:
                self._connections[peer] = connection
                self._threads[peer] = thread
            thread.start()

    def _serve(self, peer: int, connection: socket.socket) -> None:
        try:
            while not self._closed:
                self._answer(peer, connection)
        except (PeerGone, PeerTimeout):
            pass
        except TransportError as error:
            logger.warning("control connection %d of %s: %s", peer, self._address, error)
        finally:
            with self._lock:
                self._connections.pop(peer, None)
            connection.close()
            self._handler.gone(peer)
            with self._lock:
                self._threads.pop(peer, None)

    def _answer(self, peer: int, connection: socket.socket) -> None:
        body, fds = receive_frame(connection, None)
        connection.settimeout(SEND_TIMEOUT_S)
        windows: Sequence[Window] = ()
        returned: Sequence[Window] = ()
        try:
            try:
                verb = str(body.pop("verb", ""))
                sizes = body.pop("windows", [])
                windows = _adopt(fds, sizes)
                answer, returned = self._handler.handle(peer, verb, body, windows)
            except EaasError as error:
                send_frame(connection, {"error": str(error)})
                return
            except Exception as error:
                # a fault of the handler is told to its caller, and ends nothing
                logger.exception("control call %r of %s failed", body, self._address)
                send_frame(connection, {"error": f"{type(error).__name__}: {error}"})
                return
            answer = {**answer, "windows": [window.nbytes for window in returned]}
            send_frame(connection, answer, [window.fd for window in returned])
        finally:
            # the handler keeps views of the memory; nobody needs the descriptors any more
            for window in (*windows, *returned):
                window.close()


class _SharedMemoryLink(Link):
    def __init__(self, address: str, timeout: float) -> None:
        self._address = address
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ended = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(socket_name(address))
        except (OSError, ConfigError) as error:
            self._socket.close()
            if isinstance(error, ConfigError):
                raise
            raise PeerGone(f"nobody answers at {address}: {error}") from error
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN | select.POLLRDHUP)

    @override
    def call(
        self, verb: str, body: Json, windows: Sequence[Window] = (), *, timeout: float
    ) -> tuple[Json, list[Window]]:
        frame = {**body, "verb": verb, "windows": [window.nbytes for window in windows]}
        with self._lock:
            if self._ended:
                raise PeerGone(f"the control connection to {self._address} is closed")
            try:
                self._socket.settimeout(timeout)
                send_frame(self._socket, frame, [window.fd for window in windows])
                answer, fds = receive_frame(self._socket, timeout)
            except TransportError:
                # a late answer must not be taken for the next call's
                self._end()
                raise
        adopted = _adopt(fds, answer.pop("windows", []))
        if "error" in answer:
            for window in adopted:
                window.close()
            raise HandshakeRefused(f"{self._address}: {answer['error']}")
        return answer, adopted

    @property
    @override
    def closed(self) -> bool:
        if self._ended:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            # nobody sends unasked: between calls, anything to read is the end
            return self._ended or bool(self._poll.poll(0))
        finally:
            self._lock.release()

    @override
    def close(self) -> None:
        if self._pid == os.getpid():
            with self._lock:
                self._end()

    def _end(self) -> None:
        self._ended = True
        self._socket.close()


def _adopt(fds: list[int], sizes: Any) -> list[Window]:
    """Return the windows behind descriptors; on any fault all of them are closed."""
    windows: list[Window] = []
    try:
        if not isinstance(sizes, list):
            raise TransportError(f"a frame's windows are a list of sizes, got {sizes!r}")
        if len(fds) != len(sizes):
            raise TransportError(f"a frame announces {len(sizes)} windows and brings {len(fds)}")
        while fds:
            windows.append(adopt_window(fds.pop(0), sizes[len(windows)]))
    except BaseException:
        for window in windows:
            window.close()
        for fd in fds:
            os.close(fd)
        raise
    return windows


def _bind(address: str) -> socket.socket:
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


def _is_own_user(connection: socket.socket) -> bool:
    """Return whether the peer runs as this user, or as root: nobody else gets a window."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", data)
    return uid in (os.geteuid(), 0)
