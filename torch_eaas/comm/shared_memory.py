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
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from torch_eaas.access import DENIED
from torch_eaas.comm.frames import receive_frame, send_frame
from torch_eaas.comm.polling import Poller
from torch_eaas.comm.transport import Handler, Json, Link, Listener, Transport
from torch_eaas.comm.unix_sockets import PREFIX, bind, is_own_user, socket_name
from torch_eaas.comm.window import Window, adopt_window, create_window
from torch_eaas.errors import (
    AccessDenied,
    ConfigError,
    EaasError,
    HandshakeRefused,
    PeerGone,
    PeerTimeout,
    TransportError,
)

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
    def dial(self, address: str, timeout: float, token: str = "") -> Link:
        return _SharedMemoryLink(address, timeout, token)

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


class _SharedMemoryListener(Listener):
    def __init__(self, address: str, handler: Handler) -> None:
        self._address = address
        self._handler = handler
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._socket = bind(address)
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
            if not is_own_user(connection) or len(self._connections) >= MAX_CONNECTIONS:
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
                # before anything of the call is looked at: no window is mapped for a stranger
                if not self._handler.admits(peer, body.pop("token", None)):
                    _close_all(fds)
                    send_frame(connection, {"error": DENIED, "denied": True})
                    return
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
    def __init__(self, address: str, timeout: float, token: str) -> None:
        self._address = address
        self._token = {"token": token} if token else {}
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
        if not is_own_user(self._socket):
            # anybody may take an abstract name that is free, and would be told the token
            self._socket.close()
            raise AccessDenied(f"{address} belongs to another user; only one's own is asked")
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN | select.POLLRDHUP)

    @override
    def call(
        self, verb: str, body: Json, windows: Sequence[Window] = (), *, timeout: float
    ) -> tuple[Json, list[Window]]:
        sizes = [window.nbytes for window in windows]
        frame = {**body, **self._token, "verb": verb, "windows": sizes}
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
            refusal = AccessDenied if answer.get("denied") else HandshakeRefused
            raise refusal(f"{self._address}: {answer['error']}")
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
        _close_all(fds)
        raise
    return windows


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
