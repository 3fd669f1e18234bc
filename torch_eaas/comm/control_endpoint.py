"""A server's control endpoint on a unix socket: who is admitted, calls, windows, and their ends."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence

from typing_extensions import override

from torch_eaas.access import DENIED
from torch_eaas.comm.frames import receive_frame, send_frame
from torch_eaas.comm.lifeline import Lifeline
from torch_eaas.comm.transport import Handler, Json, Listener, Reply
from torch_eaas.comm.unix_link import LIFELINE, adopt_windows, close_all
from torch_eaas.comm.unix_sockets import PREFIX, bind, is_own_user, socket_name
from torch_eaas.comm.window import Window, WindowMaker
from torch_eaas.errors import EaasError, PeerGone, PeerTimeout, TransportError

MAX_CONNECTIONS = 1024
SEND_TIMEOUT_S = 5.0
CLOSE_S = 1.0

logger = logging.getLogger(__name__)


class ControlEndpoint(Listener):
    """Serves each connection in a thread of its own; the kernel tells its clients of its death.

    Args:
        address: Where it listens.
        handler: What answers the calls.
        windows: What takes in the windows that clients send.
    """

    def __init__(self, address: str, handler: Handler, windows: WindowMaker) -> None:
        self._address = address
        self._handler = handler
        self._windows = windows
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._socket = bind(address)
        self._lifeline = Lifeline()
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
        try:
            self._lifeline.hold()
        except TransportError as error:
            logger.info("control endpoint %s: %s", self._address, error)
        self._accept_all()
        self._lifeline.let_go()

    def _accept_all(self) -> None:
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
                    close_all(fds)
                    send_frame(connection, {"error": DENIED, "denied": True})
                    return
                verb = str(body.pop("verb", ""))
                windows = self._adopt(fds, body)
                answer, returned = self._handle(peer, verb, body, windows)
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

    def _adopt(self, fds: list[int], body: Json) -> Sequence[Window]:
        """Return the windows that came with a call, if both ends mean the same by a window."""
        sizes, theirs = body.pop("windows", []), body.pop("transport", self._windows.name)
        if fds and theirs != self._windows.name:
            close_all(fds)
            raise TransportError(
                f"the client's windows are {theirs}'s, this server's are {self._windows.name}'s; "
                f"give both the same transport (transport=, --transport)"
            )
        return adopt_windows(fds, sizes, self._windows)

    def _handle(self, peer: int, verb: str, body: Json, windows: Sequence[Window]) -> Reply:
        if verb == LIFELINE:
            return {}, (self._lifeline.hand_out(),)
        return self._handler.handle(peer, verb, body, windows)
