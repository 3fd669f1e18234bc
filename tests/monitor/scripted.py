"""An event stream that breaks, hangs or lies as a test says, which no real monitor does."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def frame(number: int, kind: str = "placement", term: int = 1, version: int = 1) -> bytes:
    """Return an event as a monitor sends it."""
    data = f'{{"kind": "{kind}", "text": "t", "term": {term}, "version": {version}}}'
    return f"id: {'0' * 16}-{number}\nevent: {kind}\ndata: {data}\n\n".encode()


class ScriptedStream:
    """Answers each connection as ``answer`` does, and keeps the requests; a connection stays open
    until the end unless ``answer`` closes it."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self.requests: list[str] = []
        self._answer = answer
        self._open: list[socket.socket] = []
        self._sock = socket.create_server(("127.0.0.1", 0))
        self._sock.settimeout(0.05)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                continue
            sock.settimeout(5)
            self._open.append(sock)
            with contextlib.suppress(OSError):
                self.requests.append(sock.recv(1 << 16).decode())
                self._answer(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(10)
        for sock in (self._sock, *self._open):
            sock.close()
