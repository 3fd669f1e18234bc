"""Control frames on a socket: a length, a JSON object, and, in one host, descriptors beside it.

No pickle: a frame is data. Its size is bounded, and every read has a deadline.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from array import array
from collections.abc import Sequence

from torch_eaas.comm.transport import Json
from torch_eaas.errors import PeerGone, PeerTimeout, TransportError

MAX_FRAME_BYTES = 16 << 20
MAX_FDS = 4
FRAME_TIMEOUT_S = 5.0
"""How long the rest of a frame may take after its first byte, where nobody said otherwise."""

_LENGTH = struct.Struct("<I")
_FD_BYTES = array("i").itemsize
_CHUNK_BYTES = 1 << 16


def send_frame(sock: socket.socket, body: Json, fds: Sequence[int] = ()) -> None:
    """Send one frame, within the socket's timeout; the descriptors travel with its first byte.

    Raises:
        PeerGone: The connection has ended.
        PeerTimeout: The peer does not read.
    """
    data = json.dumps(body, separators=(",", ":")).encode()
    frame = _LENGTH.pack(len(data)) + data
    timeout = sock.gettimeout()
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        sent = socket.send_fds(sock, [frame], list(fds)) if fds else sock.send(frame)
        while sent < len(frame):
            if deadline is not None:
                # in a TLS socket's sendall each part would have the whole time
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                sock.settimeout(left)
            sent += sock.send(frame[sent : sent + _CHUNK_BYTES])
    except TimeoutError as error:
        raise PeerTimeout(f"the peer did not take a frame of {len(frame)} bytes") from error
    except OSError as error:
        raise PeerGone(f"the control connection has ended: {error}") from error


def receive_frame(
    sock: socket.socket, timeout: float | None, max_bytes: int = MAX_FRAME_BYTES
) -> tuple[Json, list[int]]:
    """Return the next frame and the descriptors that came with it, which the caller then owns.

    Args:
        sock: The connection.
        timeout: Seconds for the whole frame; None waits for its first byte as long as the
            connection lives.
        max_bytes: The largest frame.

    Raises:
        PeerGone: The connection has ended.
        PeerTimeout: The frame did not come, or not whole, in time.
        TransportError: What came is no frame.
    """
    fds: list[int] = []
    try:
        if timeout is None:
            head = _receive(sock, 1, None, 0.0, fds)
            timeout = FRAME_TIMEOUT_S
        else:
            head = b""
        deadline = time.monotonic() + timeout
        head += _receive(sock, _LENGTH.size - len(head), deadline, timeout, fds)
        (length,) = _LENGTH.unpack(head)
        if length > max_bytes:
            raise TransportError(f"a frame has at most {max_bytes} bytes, got {length}")
        data = _receive(sock, length, deadline, timeout, fds)
        body = json.loads(data)
        if not isinstance(body, dict):
            raise TransportError(f"a frame is a JSON object, got {type(body).__name__}")
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, ValueError | RecursionError):
            raise TransportError(f"a frame is not JSON: {error}") from error
        raise
    return body, fds


def _receive(
    sock: socket.socket, length: int, deadline: float | None, timeout: float, fds: list[int]
) -> bytes:
    """Return exactly ``length`` bytes; descriptors that come along go to ``fds``."""
    data = bytearray()
    while len(data) < length:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise PeerTimeout(f"{len(data)} of {length} bytes of a frame came in {timeout:g} s")
        try:
            sock.settimeout(left)
            chunk = _receive_some(sock, length - len(data), fds)
        except TimeoutError:
            continue
        except OSError as error:
            raise PeerGone(f"the control connection has ended: {error}") from error
        if not chunk:
            raise PeerGone("the peer closed the control connection")
        data += chunk
    return bytes(data)


def _receive_some(sock: socket.socket, length: int, fds: list[int]) -> bytes:
    if sock.family != socket.AF_UNIX:
        return sock.recv(min(length, _CHUNK_BYTES))
    # socket.recv_fds ignores its flags, and no program that is started may inherit these
    chunk, messages, flags, _ = sock.recvmsg(
        length, socket.CMSG_LEN(MAX_FDS * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    fds.extend(_descriptors(messages))
    if len(fds) > MAX_FDS or flags & socket.MSG_CTRUNC:
        raise TransportError(f"a frame brings at most {MAX_FDS} descriptors")
    return chunk


def _descriptors(messages: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """Return the file descriptors among a message's ancillary data."""
    fds = array("i")
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // _FD_BYTES * _FD_BYTES])
    return fds.tolist()
