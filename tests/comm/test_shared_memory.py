"""Shared memory keeps the contract, between processes too; what is special to it is below."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typing_extensions import override

from tests.comm.transport_contract import (
    TIMEOUT_S,
    HostWindowContract,
    PlannedHandler,
    eventually,
)
from tests.comm.unix_contract import UnixTransportContract, num_fds
from torch_eaas.comm import polling, unix_sockets
from torch_eaas.comm.frames import receive_frame, send_frame
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Link, Listener, Transport
from torch_eaas.comm.unix_sockets import is_own_user, socket_name
from torch_eaas.comm.window import create_window
from torch_eaas.errors import AccessDenied, ConfigError, HandshakeRefused, PeerGone, TransportError

ON_X86 = platform.machine() in ("x86_64", "AMD64")
needs_x86 = pytest.mark.skipif(not ON_X86, reason="shared_memory needs x86-64's store order")


def dial_by_hand(address: str) -> socket.socket:
    """Return a connection that sends what it likes."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(TIMEOUT_S)
    sock.connect(socket_name(address))
    return sock


@needs_x86
class TestSharedMemory(UnixTransportContract, HostWindowContract):
    MAKES = (
        "from torch_eaas.comm.shared_memory import SharedMemoryTransport\n"
        "transport = SharedMemoryTransport()"
    )

    @pytest.fixture
    @override
    def server(self) -> Transport:
        return SharedMemoryTransport()

    @pytest.fixture
    @override
    def client(self, server: Transport) -> Transport:
        return SharedMemoryTransport()

    # -- what is left behind -------------------------------------------------------------------

    def test_a_socket_file_is_gone_when_its_server_has_closed(
        self, server: Transport, client: Transport, handler: PlannedHandler, tmp_path: Path
    ) -> None:
        address = f"unix:{tmp_path / 'server'}"
        listener = server.listen(address, handler)
        assert os.listdir(tmp_path) == ["server"]
        client.dial(address, TIMEOUT_S).close()
        listener.close()
        assert os.listdir(tmp_path) == []
        with pytest.raises(PeerGone, match="nobody answers at"):
            client.dial(address, TIMEOUT_S)

    def test_windows_and_addresses_without_a_path_leave_no_file(
        self, client: Transport, listener: Listener
    ) -> None:
        assert listener.address.startswith("unix:@")
        window = client.create_window(64)
        assert os.readlink(f"/proc/self/fd/{window.fd}").startswith("/memfd:")
        window.close()
        assert not [name for name in os.listdir("/dev/shm") if "eaas" in name]

    def test_a_file_that_a_killed_server_left_is_named_in_the_error(
        self, server: Transport, handler: PlannedHandler, tmp_path: Path
    ) -> None:
        (tmp_path / "left").touch()
        with pytest.raises(
            ConfigError, match=r"cannot listen at unix:.*left: .*; if no server runs there, remove"
        ):
            server.listen(f"unix:{tmp_path / 'left'}", handler)

    # -- what a peer may send ------------------------------------------------------------------

    @pytest.mark.parametrize(
        "data",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            struct.pack("<I", 5) + b"pickl",
            struct.pack("<I", 2) + b"[]",
            struct.pack("<I", 100) + b"{",
        ],
        ids=["HTTP", "no JSON", "a list", "half a frame"],
    )
    def test_garbage_ends_its_own_connection_and_no_other(
        self, data: bytes, link: Link, listener: Listener, handler: PlannedHandler
    ) -> None:
        bad = dial_by_hand(listener.address)
        bad.sendall(data)
        bad.shutdown(socket.SHUT_WR)
        # the server leaves the rest unread, which ends the connection with a reset
        with contextlib.suppress(ConnectionResetError):
            assert bad.recv(100) == b""
        bad.close()
        assert eventually(lambda: len(handler.ended) == 1)
        assert link.call("echo", {}, timeout=TIMEOUT_S)[0]["echo"] == {}
        assert not link.closed

    def test_a_client_that_stops_within_a_frame_holds_up_nobody(
        self, link: Link, listener: Listener
    ) -> None:
        bad = dial_by_hand(listener.address)
        bad.sendall(b"\x10\0\0")
        start = time.monotonic()
        for _ in range(10):
            link.call("echo", {}, timeout=TIMEOUT_S)
        assert time.monotonic() - start < 2
        bad.close()

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            pytest.param([64, 64], "announces 2 windows and brings 1", id="too few"),
            pytest.param([], "announces 0 windows and brings 1", id="too many"),
            pytest.param([32], "must be sealed and have 32 bytes, got", id="another size"),
            pytest.param(["64"], "must be sealed and have 64 bytes", id="a text"),
            pytest.param(64, "windows are a list of sizes, got 64", id="no list"),
            pytest.param(None, "windows are a list of sizes, got None", id="null"),
            pytest.param({"a": 1}, "windows are a list of sizes", id="an object"),
        ],
    )
    def test_windows_that_are_not_as_announced_are_refused_with_a_text(
        self, sizes: object, message: str, listener: Listener
    ) -> None:
        bad = dial_by_hand(listener.address)
        window = create_window(64)
        send_frame(bad, {"verb": "echo"})
        receive_frame(bad, TIMEOUT_S)
        before = num_fds()
        # twice: the connection lives on
        for _ in range(2):
            send_frame(bad, {"verb": "echo", "windows": sizes}, [window.fd])
            answer, _ = receive_frame(bad, TIMEOUT_S)
            assert message in answer["error"]
        assert eventually(lambda: num_fds() <= before)
        window.close()
        bad.close()

    def test_a_window_that_is_not_sealed_is_refused_with_a_text(self, listener: Listener) -> None:
        bad = dial_by_hand(listener.address)
        fd = os.memfd_create("by-hand", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 64)
        send_frame(bad, {"verb": "handshake", "size": 64, "windows": [64]}, [fd])
        answer, fds = receive_frame(bad, TIMEOUT_S)
        assert "must be sealed and have 64 bytes, got seals 0x0" in answer["error"]
        assert fds == []
        os.close(fd)
        bad.close()

    def test_a_server_that_sends_windows_beside_an_error_leaves_none_open(
        self, client: Transport
    ) -> None:
        before = num_fds()
        with planned_server({"error": "no room", "windows": [64]}, 1) as address:
            link = client.dial(address, TIMEOUT_S)
            with pytest.raises(HandshakeRefused, match="no room"):
                link.call("handshake", {}, timeout=TIMEOUT_S)
            link.close()
        assert eventually(lambda: num_fds() <= before)

    @pytest.mark.parametrize("windows", [[64], "x", None], ids=str)
    def test_a_servers_answer_that_announces_other_windows_is_an_error(
        self, client: Transport, windows: object
    ) -> None:
        with planned_server({"windows": windows}, 0) as address:
            link = client.dial(address, TIMEOUT_S)
            with pytest.raises(TransportError, match=r"announces 1 windows and brings 0|a list"):
                link.call("handshake", {}, timeout=TIMEOUT_S)
            link.close()

    @pytest.mark.parametrize(
        ("address", "message"),
        [
            ("unix:", "is unix:/path or unix:@name, got 'unix:'"),
            ("unix:@", "is unix:/path or unix:@name, got 'unix:@'"),
            ("unix:relative", "is unix:/path or unix:@name, got 'unix:relative'"),
            ("loopback:a", "is unix:/path or unix:@name, got 'loopback:a'"),
            ("unix:@a\0b", r"is unix:/path or unix:@name, got 'unix:@a\\x00b'"),
            ("unix:/a\ud800", r"is unix:/path or unix:@name, got 'unix:/a\\ud800'"),
            ("unix:@" + "x" * 107, "a unix socket's name has at most 107 bytes"),
        ],
    )
    def test_an_address_that_is_none_is_refused_at_both_ends(
        self, server: Transport, handler: PlannedHandler, address: str, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            server.listen(address, handler)
        with pytest.raises(ConfigError, match=message):
            server.dial(address, TIMEOUT_S)

    # -- waiting -------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("waited", "timeout", "shortest_us", "longest_us"),
        [
            pytest.param(0.0, 0.0005, 50, 50, id="fresh"),
            pytest.param(0.0016, 0.0016, 100, 200, id="after 1.6 ms"),
            pytest.param(0.1, 0.1, 200, 200, id="idle"),
            pytest.param(60.0, 0.1, 500, 500, id="long idle"),
        ],
    )
    def test_a_sleep_is_a_sixteenth_of_the_wait_within_bounds(
        self,
        server: Transport,
        monkeypatch: pytest.MonkeyPatch,
        waited: float,
        timeout: float,
        shortest_us: int,
        longest_us: int,
    ) -> None:
        clock = PlannedTime()
        monkeypatch.setattr(polling, "time", clock)

        def ready() -> bool:
            clock.now += 0.5e-6
            return False

        assert not server.wait(ready, timeout, waited)
        sleeps = sorted(clock.sleeps_us)
        assert sleeps[0] == pytest.approx(shortest_us, abs=1)
        assert sleeps[-1] == pytest.approx(longest_us, rel=0.07)
        assert clock.now >= timeout

    def test_a_quiet_time_is_one_sleep_and_then_the_wait_is_fresh(
        self, server: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = PlannedTime()
        monkeypatch.setattr(polling, "time", clock)

        def ready() -> bool:
            clock.now += 0.5e-6
            return clock.now > 0.0031

        assert server.wait(ready, 1.0, quiet=0.003)
        assert clock.sleeps_us == {3000: 1}

    def test_spinning_stops_where_it_never_pays_and_is_tried_again(
        self, server: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = PlannedTime()
        monkeypatch.setattr(polling, "time", clock)
        looks = 0

        def ready() -> bool:
            nonlocal looks
            looks += 1
            clock.now += 0.5e-6
            return False

        spun = []
        for _ in range(60):
            looks = 0
            server.wait(ready, 200e-6)
            spun.append(looks > 100)
        assert spun[:8] == [True] * 8
        assert spun[8:].count(True) == 1

    def test_every_thread_that_waits_has_precise_sleeps(self, server: Transport) -> None:
        libc = ctypes.CDLL(None)
        get_slack, set_slack = 30, 29
        slacks: list[int] = []

        def wait() -> None:
            libc.prctl(set_slack, ctypes.c_ulong(50_000), 0, 0, 0)
            server.wait(lambda: False, 1e-4)
            slacks.append(libc.prctl(get_slack, 0, 0, 0, 0))

        # the system gives an ended thread's number to the next one
        for _ in range(3):
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
        assert slacks == [1, 1, 1]


class PlannedTime:
    """Stands for the module ``time``: a sleep takes exactly what it should, and no time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps_us: dict[int, int] = {}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        pause = round(seconds * 1e6)
        self.sleeps_us[pause] = self.sleeps_us.get(pause, 0) + 1


class planned_server:  # noqa: N801 - reads as a function
    """A server that answers one call with a planned frame and some windows of 64 bytes."""

    def __init__(self, answer: dict[str, object], num_windows: int) -> None:
        self._answer, self._num_windows = answer, num_windows
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._windows = [create_window(64) for _ in range(num_windows)]

    def __enter__(self) -> str:
        self._socket.bind("")
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        name: bytes = self._socket.getsockname()
        return f"unix:@{name[1:].decode()}"

    def __exit__(self, *exc: object) -> None:
        self._thread.join()
        self._socket.close()
        for window in self._windows:
            window.close()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            receive_frame(connection, TIMEOUT_S)
            send_frame(connection, self._answer, [window.fd for window in self._windows])
            connection.recv(1)


# -- whom it serves ----------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "riscv64", ""])
def test_other_processors_are_refused_with_the_reason(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(
        ConfigError,
        match=rf"needs x86-64: Python has no memory fence, and on {machine} a word could become "
        r"visible before its payload; use loopback",
    ):
        SharedMemoryTransport()
    LoopbackTransport()


class Credentials:
    """A connection whose peer runs as a planned user."""

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self.closed = False

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return struct.pack("3i", 4242, self._uid, 100)


@pytest.mark.parametrize(
    ("uid", "is_served"), [(1000, True), (0, True), (1001, False), (65534, False)]
)
def test_only_the_same_user_and_root_are_served(
    uid: int, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check: Callable[[object], bool] = is_own_user
    assert check(Credentials(uid)) == is_served


@needs_x86
def test_a_stranger_is_turned_away_before_a_byte_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "is_own_user", lambda connection: False)
    transport = SharedMemoryTransport()
    handler = PlannedHandler(transport)
    listener = transport.listen("", handler)
    with dial_by_hand(listener.address) as stranger:
        assert stranger.recv(1) == b""
    assert handler.ended == []
    listener.close()


@needs_x86
def test_a_server_of_another_user_is_not_asked_and_told_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unix_sockets, "is_own_user", lambda connection: False)
    address = "unix:@eaas-test-another-user"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(socket_name(address))
        sock.listen()
        with pytest.raises(AccessDenied, match=f"{address} belongs to another user"):
            SharedMemoryTransport().dial(address, TIMEOUT_S, "a-token-of-this-test")
        connection, _ = sock.accept()
        with connection:
            assert connection.recv(1) == b""
