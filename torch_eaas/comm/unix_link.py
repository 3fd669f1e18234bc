"""A client's control connection over a unix socket: calls, descriptors of windows, and its end."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from torch_eaas.comm.frames import receive_frame, send_frame
from torch_eaas.comm.lifeline import LIFELINE_BYTES, LifelineReader
from torch_eaas.comm.transport import Json, Link
from torch_eaas.comm.unix_sockets import is_own_user, socket_name
from torch_eaas.comm.window import Window, WindowMaker, adopt_window
from torch_eaas.errors import (
    AccessDenied,
    ConfigError,
    HandshakeRefused,
    PeerGone,
    TransportError,
)

LIFELINE = "lifeline"
"""The control call that hands out a listener's lifeline; the transport answers it itself."""


class UnixLink(Link):
    """One control connection; its end, or the peer's lifeline, tells that the peer is gone.

    Args:
        address: The control endpoint.
        timeout: Seconds until it must have answered.
        token: What the listener asks for.
        windows: What takes in the windows that the listener sends.
    """

    def __init__(self, address: str, timeout: float, token: str, windows: WindowMaker) -> None:
        self._address = address
        self._windows = windows
        self._about = {"transport": windows.name, **({"token": token} if token else {})}
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lifeline: LifelineReader | None = None
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
        answer, fds = self._ask(verb, body, windows, timeout)
        adopted = adopt_windows(fds, answer.pop("windows", []), self._windows)
        if verb == "handshake":
            try:
                self._watch(timeout)
            except BaseException:
                _close_windows(adopted)
                raise
        return answer, adopted

    def _ask(
        self, verb: str, body: Json, windows: Sequence[Window], timeout: float
    ) -> tuple[Json, list[int]]:
        """Return the answer to one frame and the descriptors that came with it."""
        sizes = [window.nbytes for window in windows]
        frame = {**body, **self._about, "verb": verb, "windows": sizes}
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


def adopt_windows(fds: list[int], sizes: Any, windows: WindowMaker) -> list[Window]:
    """Return the windows behind descriptors; on any fault all of them are closed."""
    adopted: list[Window] = []
    try:
        if not isinstance(sizes, list):
            raise TransportError(f"a frame's windows are a list of sizes, got {sizes!r}")
        if len(fds) != len(sizes):
            raise TransportError(f"a frame announces {len(sizes)} windows and brings {len(fds)}")
        while fds:
            adopted.append(windows.adopt(fds.pop(0), sizes[len(adopted)]))
    except BaseException:
        _close_windows(adopted)
        close_all(fds)
        raise
    return adopted


def close_all(fds: list[int]) -> None:
    """Close descriptors that nobody took."""
    for fd in fds:
        os.close(fd)


def _close_windows(windows: Sequence[Window]) -> None:
    for window in windows:
        window.close()
