"""A server's control endpoint on a socket: who is admitted, calls, windows, and their ends."""

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
from torch_eaas.comm.control_link import LIFELINE
from torch_eaas.comm.door import Door
from torch_eaas.comm.frames import FRAME_TIMEOUT_S, MAX_FRAME_BYTES, receive_frame, send_frame
from torch_eaas.comm.lifeline import LIFELINE_BYTES, Lifeline
from torch_eaas.comm.passed_windows import adopt_windows, close_all, hand_on
from torch_eaas.comm.transport import Handler, Json, Listener
from torch_eaas.comm.window import Window, WindowMaker
from torch_eaas.errors import EaasError, PeerGone, PeerTimeout, TransportError

MAX_CONNECTIONS = 1024
SEND_TIMEOUT_S = 5.0
CLOSE_S = 1.0
STRANGER_BYTES = 1 << 16
"""The largest frame of a connection that has not shown the token."""

logger = logging.getLogger(__name__)


class ControlEndpoint(Listener):
    """Serves each connection in a thread of its own; the kernel tells its clients of its death.

    A connection from another host is a stranger's until it has shown the token, for which it has
    ``FRAME_TIMEOUT_S`` in all.

    Args:
        door: Where it listens; it is closed with the endpoint.
        handler: What answers the calls.
        windows: What takes in the windows that clients send.
    """

    def __init__(self, door: Door, handler: Handler, windows: WindowMaker) -> None:
        self._door = door
        self._address = door.address
        self._handler = handler
        self._windows = windows
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._lifeline = Lifeline() if door.is_local else None
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
            self._door.listening.shutdown(socket.SHUT_RDWR)
        # the address is taken until the thread has left the kernel
        self._thread.join(SEND_TIMEOUT_S)
        self._door.close()
        with self._lock:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    # beneath TLS, which its own thread is using
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
            threads = list(self._threads.values())
        # a thread that still lets go of windows when the interpreter ends would end it hard
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_S)

    def _accept(self) -> None:
        lifeline = self._lifeline
        if lifeline is None:
            self._accept_all()
            return
        try:
            lifeline.hold()
        except TransportError as error:
            logger.info("control endpoint %s: %s", self._address, error)
        self._accept_all()
        lifeline.let_go()

    def _accept_all(self) -> None:
        peer = 0
        while not self._closed:
            try:
                connection, _ = self._door.listening.accept()
            except OSError as error:
                if not self._closed:
                    logger.warning("control endpoint %s: accept failed: %s", self._address, error)
                    time.sleep(0.1)
                continue
            if len(self._connections) >= MAX_CONNECTIONS:
                connection.close()
                continue
            try:
                connection = self._door.take(connection)
            except OSError:
                # it has ended already
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
        is_in = False
        known_by = time.monotonic() + FRAME_TIMEOUT_S
        try:
            self._door.greet(connection)
            is_in = True
            self._answer_all(peer, connection, known_by)
        except (PeerGone, PeerTimeout) as error:
            logger.debug("control connection %d of %s: %s", peer, self._address, error)
        except TransportError as error:
            # where others may come, they must not fill the log
            level = logging.WARNING if self._door.is_local else logging.DEBUG
            logger.log(level, "control connection %d of %s: %s", peer, self._address, error)
        finally:
            with self._lock:
                self._connections.pop(peer, None)
            connection.close()
            if is_in:
                self._handler.gone(peer)
            with self._lock:
                self._threads.pop(peer, None)

    def _answer_all(self, peer: int, connection: socket.socket, known_by: float) -> None:
        is_known = self._door.is_local
        while not self._closed:
            timeout = None if is_known else max(0.0, known_by - time.monotonic())
            max_bytes = MAX_FRAME_BYTES if is_known else STRANGER_BYTES
            body, fds = receive_frame(connection, timeout, max_bytes)
            connection.settimeout(SEND_TIMEOUT_S)
            # before anything of the call is looked at: no window is mapped for a stranger
            if self._handler.admits(peer, body.pop("token", None)):
                is_known = True
                self._answer(peer, connection, body, fds)
            else:
                close_all(fds)
                send_frame(connection, {"error": DENIED, "denied": True})

    def _answer(self, peer: int, connection: socket.socket, body: Json, fds: list[int]) -> None:
        windows: Sequence[Window] = ()
        returned: Sequence[Window] = ()
        answer: Json
        try:
            try:
                verb = str(body.pop("verb", ""))
                windows = self._adopt(fds, body)
                if verb == LIFELINE and self._lifeline is not None:
                    # in this host's memory, wherever the transport's windows are
                    returned = (self._lifeline.hand_out(),)
                    answer, told, handed = {}, [LIFELINE_BYTES], [returned[0].fd]
                else:
                    answer, returned = self._handler.handle(peer, verb, body, windows)
                    told, handed = hand_on(returned, self._windows)
            except EaasError as error:
                send_frame(connection, {"error": str(error)})
                return
            except Exception as error:
                # a fault of the handler is told to its caller, and ends nothing
                logger.exception("control call %r of %s failed", body, self._address)
                send_frame(connection, {"error": f"{type(error).__name__}: {error}"})
                return
            send_frame(connection, {**answer, "windows": told}, handed)
        finally:
            # the handler keeps views of the memory; nobody needs the descriptors any more
            for window in (*windows, *returned):
                window.close()

    def _adopt(self, fds: list[int], body: Json) -> Sequence[Window]:
        """Return the windows that came with a call, if both ends mean the same by a window."""
        told, theirs = body.pop("windows", []), body.pop("transport", self._windows.name)
        if (fds or told) and theirs != self._windows.name:
            close_all(fds)
            raise TransportError(
                f"the client's windows are {theirs}'s, this server's are {self._windows.name}'s; "
                f"give both the same transport (transport=, --transport)"
            )
        return adopt_windows(fds, told, self._windows)
