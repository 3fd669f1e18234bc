"""Who may listen and call over TCP, and what strangers can do there: little, and not for long."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comm.fake_cuda import fake_transport
from tests.comm.numbered_windows import ANY_PORT, NumberedWindows, dial_by_hand
from tests.comm.test_shared_memory import needs_x86
from tests.comm.transport_contract import (
    TIMEOUT_S,
    TOKEN,
    PlannedHandler,
    eventually,
)
from torch_eaas.access import OPEN, Access
from torch_eaas.comm import control_endpoint, tcp_sockets
from torch_eaas.comm.frames import send_frame
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.socket_transport import SocketTransport
from torch_eaas.comm.tcp_sockets import host_and_port
from torch_eaas.comm.transport import Listener, Transport
from torch_eaas.errors import (
    AccessDenied,
    ConfigError,
    PeerGone,
    PeerTimeout,
)

WITH_TOKEN = Access(token=TOKEN)

# -- who is let in, where ----------------------------------------------------------------------


@pytest.fixture
def transport() -> SocketTransport:
    return SocketTransport(NumberedWindows())


@pytest.fixture
def handler(transport: Transport) -> PlannedHandler:
    return PlannedHandler(transport)


def test_beyond_this_machine_nobody_listens_without_a_token(
    transport: Transport, handler: PlannedHandler
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"the server would listen on tcp://192\.0\.2\.1:7000 \(--address\), which other "
        r"machines reach, without a token: give one by --token-file .*, or bind 127\.0\.0\.1",
    ):
        transport.listen("tcp://192.0.2.1:7000", handler)


def test_with_a_token_it_is_tried_and_a_missing_certificate_is_told(
    transport: Transport, handler: PlannedHandler, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "torch_eaas"),
        pytest.raises(ConfigError, match=r"cannot listen at tcp://192\.0\.2\.1:7000: "),
    ):
        transport.listen("tcp://192.0.2.1:7000", handler, WITH_TOKEN)
    assert "listens on tcp://192.0.2.1:7000 without TLS: who can read" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "0"])
def test_an_address_by_which_nobody_can_call_is_refused_with_the_next_step(
    host: str, transport: Transport, handler: PlannedHandler
) -> None:
    message = r":7000 names no host that clients could call: give the name .* tcp://HOST:7000"
    with pytest.raises(ConfigError, match=message):
        transport.listen(f"tcp://{host}:7000", handler, WITH_TOKEN)


def test_a_host_is_announced_as_it_was_given(transport: Transport, handler: PlannedHandler) -> None:
    listener = transport.listen("tcp://localhost:0", handler)
    assert listener.address == f"tcp://localhost:{host_and_port(listener.address)[1]}"
    transport.dial(listener.address, TIMEOUT_S).close()
    listener.close()


@pytest.mark.parametrize(
    "address",
    [
        *("tcp://", "tcp://:7000", "tcp://host", "tcp://host:", "tcp://host:x", "tcp://host:65536"),
        *("tcp://host:7000/", "tcp://host:7000\n", "tcp://a b:7000", "tcp://u@host:7000"),
        *("tcp://::1:7000", "tcp://[host]:7000", "tls://h\u00f6st:1", "tls://host:\u0661"),
        *("tcp://.:1", "tcp://-h:1"),
    ],
    ids=ascii,
)
def test_an_address_that_is_none_is_refused_at_both_ends(
    address: str, transport: Transport, handler: PlannedHandler
) -> None:
    message = "an address is tcp://HOST:PORT or tls://HOST:PORT, got"
    with pytest.raises(ConfigError, match=message):
        transport.listen(address, handler, WITH_TOKEN)
    with pytest.raises(ConfigError, match=message):
        transport.dial(address, TIMEOUT_S, WITH_TOKEN)


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_name_that_cannot_be_looked_up_is_nobodys(
    host: str, transport: Transport, handler: PlannedHandler
) -> None:
    with pytest.raises(PeerGone, match=f"nobody answers at tcp://{host}:1: "):
        transport.dial(f"tcp://{host}:1", TIMEOUT_S)
    with pytest.raises(ConfigError, match=f"cannot listen at tcp://{host}:1: "):
        transport.listen(f"tcp://{host}:1", handler)


def test_ipv6_is_spoken_in_brackets(transport: Transport, handler: PlannedHandler) -> None:
    try:
        listener = transport.listen("tcp://[::1]:0", handler)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    assert listener.address.startswith("tcp://[::1]:")
    link = transport.dial(listener.address, TIMEOUT_S)
    assert link.call("echo", {}, timeout=TIMEOUT_S)[0]["echo"] == {}
    link.close()
    listener.close()


def test_tls_needs_a_certificate_that_can_be_used(
    transport: Transport, handler: PlannedHandler, certified: Access, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"tls://127\.0\.0\.1:0 needs a certificate: give tls_c"):
        transport.listen("tls://127.0.0.1:0", handler, WITH_TOKEN)
    bad = Access(tls_certificate=tmp_path / "missing", tls_key=certified.tls_key)
    with pytest.raises(ConfigError, match=f"the server at {ANY_PORT} cannot use certificate"):
        transport.listen(ANY_PORT, handler, bad)


def test_an_authority_that_would_verify_nothing_is_refused_before_the_token_is_sent(
    transport: Transport, trusting: Access, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"tcp://127\.0\.0\.1:1: is no tls://, so .* would verify nothing"
    ):
        transport.dial("tcp://127.0.0.1:1", TIMEOUT_S, trusting)
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=r"cannot read certificates of .*verifies tls://\S+'s"):
        transport.dial("tls://127.0.0.1:1", 1.0, Access(tls_authority=tmp_path / "empty"))


TRANSPORTS = [
    pytest.param(SharedMemoryTransport, "windows of shared_memory are passed as", marks=needs_x86),
    (fake_transport, "windows of cuda_ipc are passed as descriptors"),
    (LoopbackTransport, "loopback joins threads of one process"),
]


@pytest.mark.parametrize(("make", "match"), TRANSPORTS, ids=["shared_memory", "cuda", "loopback"])
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tls://127.0.0.1:7000"])
def test_transports_of_one_host_refuse_it_and_name_what_to_use(
    make: Any, match: str, address: str
) -> None:
    transport = make()
    with pytest.raises(ConfigError, match=f"{address}: {match}.* NvshmemTransport"):
        transport.listen(address, PlannedHandler(transport), WITH_TOKEN)
    with pytest.raises(ConfigError, match=f"{address}: {match}.* NvshmemTransport"):
        transport.dial(address, TIMEOUT_S, WITH_TOKEN)


# -- strangers ---------------------------------------------------------------------------------


@pytest.fixture
def guarded(transport: Transport, handler: PlannedHandler) -> Iterator[Listener]:
    handler.access = WITH_TOKEN
    listener = transport.listen(ANY_PORT, handler, WITH_TOKEN)
    yield listener
    listener.close()


def test_who_has_not_shown_the_token_in_time_is_put_out_and_who_has_may_idle(
    guarded: Listener, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_endpoint, "FRAME_TIMEOUT_S", 0.6)
    friend = transport.dial(guarded.address, TIMEOUT_S, WITH_TOKEN)
    friend.call("echo", {}, timeout=TIMEOUT_S)
    began = time.monotonic()
    silent = transport.dial(guarded.address, TIMEOUT_S)
    insisting = transport.dial(guarded.address, TIMEOUT_S)
    # calls without the token earn no more time
    while not insisting.closed and time.monotonic() < began + TIMEOUT_S:
        with contextlib.suppress(AccessDenied, PeerGone):
            insisting.call("echo", {}, timeout=TIMEOUT_S)
        time.sleep(0.02)
    assert eventually(lambda: silent.closed)
    assert 0.5 <= time.monotonic() - began < 3
    assert friend.call("echo", {"n": 1}, timeout=TIMEOUT_S)[0]["echo"] == {"n": 1}
    for link in (friend, silent, insisting):
        link.close()


def test_a_strangers_frame_is_small_and_a_friends_may_be_large(
    guarded: Listener, transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "torch_eaas"), dial_by_hand(guarded.address) as stranger:
        stranger.sendall((control_endpoint.STRANGER_BYTES + 1).to_bytes(4, "little"))
        assert stranger.recv(1) == b""
    # whoever likes could fill the log
    assert caplog.text == ""
    link = transport.dial(guarded.address, TIMEOUT_S, WITH_TOKEN)
    link.call("echo", {}, timeout=TIMEOUT_S)
    body = {"text": "x" * 2 * control_endpoint.STRANGER_BYTES}
    assert link.call("echo", body, timeout=TIMEOUT_S)[0]["echo"] == body
    link.close()


def test_more_connections_than_are_served_are_put_out(
    guarded: Listener, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_endpoint, "MAX_CONNECTIONS", 1)
    link = transport.dial(guarded.address, TIMEOUT_S, WITH_TOKEN)
    link.call("echo", {}, timeout=TIMEOUT_S)
    with dial_by_hand(guarded.address) as second:
        assert second.recv(1) == b""
    link.close()


def test_a_connection_whose_host_falls_silent_ends(guarded: Listener) -> None:
    # shown by what the kernel is asked for: 10 s without a word, then three questions in 15 s
    connection = tcp_sockets.connect_tcp(guarded.address, TIMEOUT_S, OPEN)
    with connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        asked = [
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        assert asked == [10, 5, 3]
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


def test_dialling_who_never_speaks_tls_has_a_deadline(trusting: Access) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"tls://127.0.0.1:{mute.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(PeerGone, match=f"nobody answers at {address}: .*timed out"):
            tcp_sockets.connect_tcp(address, 0.2, trusting)
        assert 0.2 <= time.monotonic() - began < 3


def test_a_peer_that_reads_little_over_tls_gets_no_time_of_its_own_for_each_part(
    certified: Access, trusting: Access
) -> None:
    door = tcp_sockets.TcpDoor(ANY_PORT, certified)
    stop = threading.Event()

    def trickle() -> None:
        raw, _ = door.listening.accept()
        with door.take(raw) as connection:
            door.greet(connection)
            while not stop.wait(0.02):
                connection.recv(1 << 15)

    thread = threading.Thread(target=trickle)
    thread.start()
    with tcp_sockets.connect_tcp(door.address, TIMEOUT_S, trusting) as connection:
        connection.settimeout(0.3)
        began = time.monotonic()
        with pytest.raises(PeerTimeout, match="did not take a frame of 16000012 bytes"):
            send_frame(connection, {"a": "x" * 16_000_000})
        assert time.monotonic() - began < 1.5
        stop.set()
    thread.join(TIMEOUT_S)
    door.close()
