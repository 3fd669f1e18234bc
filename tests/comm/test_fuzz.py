"""Whatever comes over a control connection: an error of ours, no descriptor left, and service."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.comm.numbered_windows import ANY_PORT, NumberedWindows
from tests.comm.numbered_windows import dial_by_hand as dial_tcp
from tests.comm.test_shared_memory import dial_by_hand, needs_x86
from tests.comm.transport_contract import TIMEOUT_S, TOKEN, PlannedHandler, eventually
from tests.comm.unix_contract import num_fds
from tests.json_values import VALUE, almost
from torch_eaas.access import Access
from torch_eaas.comm import tcp_sockets
from torch_eaas.comm.frames import receive_frame, send_frame
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.socket_transport import SocketTransport
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


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("with_token", [False, True], ids=["a stranger", "a friend"])
def test_a_server_outlives_whatever_other_hosts_bring(
    secure: bool, with_token: bool, certified: Access, trusting: Access
) -> None:
    transport = SocketTransport(NumberedWindows())
    handler = PlannedHandler(transport)
    handler.access = plain = Access(token=TOKEN)
    listener = transport.listen(ANY_PORT, handler, certified if secure else plain)
    friend = trusting if secure else plain
    before = num_fds()

    def open_one() -> socket.socket:
        if with_token:
            connection = tcp_sockets.connect_tcp(listener.address, TIMEOUT_S, friend)
            send_frame(connection, {"token": TOKEN, "verb": "echo"})
            receive_frame(connection, TIMEOUT_S)
            return connection
        return dial_tcp(listener.address)

    @settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
    @given(data=BYTES)
    def bring(data: bytes) -> None:
        with open_one() as connection, contextlib.suppress(OSError):
            connection.sendall(data)
            socket.socket.shutdown(connection, socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        link = transport.dial(listener.address, TIMEOUT_S, friend)
        assert link.call("echo", {"n": 1}, timeout=TIMEOUT_S)[0]["echo"] == {"n": 1}
        link.close()

    bring()
    assert eventually(lambda: num_fds() <= before)
    listener.close()
    assert handler.came == {}
