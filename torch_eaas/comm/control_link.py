"""A client's control connection over a socket: calls, windows that go with them, and its end."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Sequence

from typing_extensions import override

from torch_eaas.comm.frames import receive_frame, send_frame
from torch_eaas.comm.lifeline import LIFELINE_BYTES, LifelineReader
from torch_eaas.comm.passed_windows import adopt_windows, close_all, close_windows, hand_on
from torch_eaas.comm.transport import Json, Link
from torch_eaas.comm.window import Window, WindowMaker, adopt_window
from torch_eaas.errors import AccessDenied, HandshakeRefused, PeerGone, TransportError

LIFELINE = "lifeline"
"""The control call that hands out a local listener's lifeline; its endpoint answers it itself."""


class ControlLink(Link):
    """One control connection; its end, or a local peer's lifeline, tells that the peer is gone.

    Args:
        connection: The connection, which this link then owns.
        address: The control endpoint, for messages.
        token: What the listener asks for.
        windows: What takes in the windows that the listener sends.
    """

    def __init__(
        self, connection: socket.socket, address: str, token: str, windows: WindowMaker
    ) -> None:
        self._socket = connection
        self._address = address
        self._windows = windows
        self._about = {"transport": windows.name, **({"token": token} if token else {})}
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lifeline: LifelineReader | None = None
        self._ended = False
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN | select.POLLRDHUP)

    @override
    def call(
        self, verb: str, body: Json, windows: Sequence[Window] = (), *, timeout: float
    ) -> tuple[Json, list[Window]]:
        answer, fds = self._ask(verb, body, windows, timeout)
        adopted = adopt_windows(fds, answer.pop("windows", []), self._windows)
        if verb == "handshake" and self._socket.family == socket.AF_UNIX:
            try:
                self._watch(timeout)
            except BaseException:
                close_windows(adopted)
                raise
        return answer, adopted

    def _ask(
        self, verb: str, body: Json, windows: Sequence[Window], timeout: float
    ) -> tuple[Json, list[int]]:
        """Return the answer to one frame and the descriptors that came with it."""
        told, handed = hand_on(windows, self._windows)
        frame = {**body, **self._about, "verb": verb, "windows": told}
        with self._lock:
            if self._ended:
                raise PeerGone(f"the control connection to {self._address} is closed")
            try:
                self._socket.settimeout(timeout)
                send_frame(self._socket, frame, handed)
                answer, fds = receive_frame(self._socket, timeout)
            except TransportError:
                # a late answer must not be taken for the next call's
                self._end()
                raise
        if "error" in answer:
            close_all(fds)
            refusal = AccessDenied if answer.get("denied") else HandshakeRefused
            raise refusal(f"{self._address}: {answer['error']}")
        return answer, fds

    def _watch(self, timeout: float) -> None:
        """From now on the kernel tells of the peer's death before its socket closes."""
        answer, fds = self._ask(LIFELINE, {}, (), timeout)
        sizes = answer.get("windows", [])
        if sizes != [LIFELINE_BYTES] or len(fds) != 1:
            close_all(fds)
            raise HandshakeRefused(
                f"{self._address}: a lifeline is one window of {LIFELINE_BYTES} bytes, got {sizes}"
            )
        # in this host's memory, wherever the transport's windows are
        self._lifeline = LifelineReader(adopt_window(fds[0], LIFELINE_BYTES))

    @property
    @override
    def closed(self) -> bool:
        lifeline = self._lifeline
        if self._ended or (lifeline is not None and lifeline.is_dead):
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
        self._lifeline = None
        self._socket.close()
