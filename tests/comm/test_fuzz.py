"""Whatever comes over a control connection: an error of ours, no descriptor left, and service."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.test_shared_memory import dial_by_hand, needs_x86
from tests.comm.transport_contract import TIMEOUT_S, PlannedHandler, eventually
from tests.comm.unix_contract import num_fds
from tests.json_values import VALUE, almost
from torch_eaas.comm.frames import receive_frame
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Listener
from torch_eaas.errors import TransportError

CALL = {"verb": "echo", "windows": [4096], "token": "x", "size": 4096, "transport": "cuda_ipc"}
JSON = (VALUE | almost(CALL)).map(lambda value: json.dumps(value).encode())
FRAME = JSON.map(lambda data: len(data).to_bytes(4, "little") + data)
BYTES = st.lists(FRAME | st.binary(max_size=40), max_size=3).map(b"".join)
NUM_FDS = st.sampled_from([0, 1, 1, 2, 6])


def send(sock: socket.socket, data: bytes, num_fds: int) -> None:
    """Send bytes, with descriptors of a memory that is no window."""
    fds = [os.memfd_create("fuzz") for _ in range(num_fds if data else 0)]
    try:
        # a server that has seen enough ends the connection
        with contextlib.suppress(OSError):
            socket.send_fds(sock, [data], fds) if fds else sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
    finally:
        for fd in fds:
            os.close(fd)


@settings(max_examples=100)
@given(data=BYTES, count=NUM_FDS)
def test_bytes_are_frames_or_errors(data: bytes, count: int) -> None:
    before = num_fds()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        send(here, data, count)
        # its end is an error too, so this ends
        with contextlib.suppress(TransportError):
            while True:
                body, fds = receive_frame(there, 1.0)
                assert isinstance(body, dict)
                for fd in fds:
                    os.close(fd)
    assert num_fds() == before


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    transport = SharedMemoryTransport()
    listener = transport.listen("", PlannedHandler(transport))
    yield listener
    listener.close()


@needs_x86
@settings(max_examples=60)
@given(data=BYTES, count=NUM_FDS)
def test_a_server_outlives_whatever_a_connection_brings(
    listener: Listener, data: bytes, count: int
) -> None:
    before = num_fds()
    with dial_by_hand(listener.address) as sock:
        send(sock, data, count)
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass
    link = SharedMemoryTransport().dial(listener.address, TIMEOUT_S)
    assert link.call("echo", {"n": 1}, timeout=TIMEOUT_S)[0]["echo"] == {"n": 1}
    link.close()
    assert eventually(lambda: num_fds() <= before)
