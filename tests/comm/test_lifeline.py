"""The kernel tells of a death before the dead process's memory is torn down."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from torch_eaas.comm.frames import receive_frame, send_frame
from torch_eaas.comm.lifeline import LIFELINE_BYTES, Lifeline, LifelineReader
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Handler, Json
from torch_eaas.comm.unix_sockets import socket_name
from torch_eaas.errors import HandshakeRefused

SERVER = """
import sys, time
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from tests.comm.test_lifeline import Greeter
ballast = bytearray(512 << 20)
ballast[::4096] = b"x" * len(ballast[::4096])
listener = SharedMemoryTransport().listen("", Greeter())
print(listener.address, flush=True)
time.sleep(60)
"""


class Greeter(Handler):
    """Answers every handshake with nothing."""

    def admits(self, peer: int, token: object) -> bool:
        return True

    def handle(self, peer: int, verb: str, body: Json, windows: object) -> tuple[Json, tuple[()]]:
        return {}, ()

    def gone(self, peer: int) -> None:
        pass


def test_a_killed_process_is_seen_as_dead_though_its_memory_is_still_there() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        link = SharedMemoryTransport().dial(address, 5)
        link.call("handshake", {}, timeout=5)
        assert not link.closed
        killed = time.monotonic()
        process.send_signal(signal.SIGKILL)
        while not link.closed and time.monotonic() < killed + 10:
            time.sleep(0.0005)
        assert link.closed
        # the kernel's word, and not the socket's end, was there first
        assert link._lifeline.is_dead  # type: ignore[attr-defined]
        link.close()


@pytest.mark.parametrize("lets_go", [False, True])
def test_a_thread_that_ends_while_it_holds_the_line_is_dead_and_one_that_let_go_is_not(
    lets_go: bool,
) -> None:
    line = Lifeline()
    reader = LifelineReader(line.hand_out())
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        line.hold()
        held.set()
        go.wait(10)
        if lets_go:
            line.let_go()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    assert not reader.is_dead
    go.set()
    thread.join(10)
    # the kernel's part of the thread ends a moment after Python's
    deadline = time.monotonic() + (0.2 if lets_go else 10)
    while not reader.is_dead and time.monotonic() < deadline:
        time.sleep(0.001)
    assert reader.is_dead is not lets_go


def test_a_listener_that_closes_is_closed_and_not_dead() -> None:
    transport = SharedMemoryTransport()
    listener = transport.listen("", Greeter())
    link = transport.dial(listener.address, 5)
    link.call("handshake", {}, timeout=5)
    listener.close()
    assert link.closed
    assert not link._lifeline.is_dead  # type: ignore[attr-defined]
    link.close()


@pytest.mark.parametrize("sizes", [[], [LIFELINE_BYTES, LIFELINE_BYTES], [1]], ids=str)
def test_a_lifeline_of_another_shape_is_refused_and_leaves_no_descriptor(sizes: list[int]) -> None:
    transport = SharedMemoryTransport()
    address = "unix:@eaas-test-lifeline"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(socket_name(address))
        sock.listen()
        link = transport.dial(address, 5)
        connection, _ = sock.accept()
        before = len(os.listdir("/proc/self/fd"))

        def answer() -> None:
            for nbytes in ([LIFELINE_BYTES], sizes):
                receive_frame(connection, 5)
                windows = [transport.create_window(n) for n in nbytes]
                send_frame(connection, {"windows": nbytes}, [window.fd for window in windows])
                for window in windows:
                    window.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with connection, pytest.raises(HandshakeRefused, match="a lifeline is one window of 128"):
            link.call("handshake", {}, timeout=5)
        thread.join(10)
        link.close()
        gc.collect()
        # the connection's two ends have gone
        assert len(os.listdir("/proc/self/fd")) == before - 2
