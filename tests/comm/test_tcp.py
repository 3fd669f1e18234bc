"""Control calls over TCP keep the contract, plain and over TLS; what is special to it is below."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from typing_extensions import override

from tests.certificates import make_certificate
from tests.comm.numbered_windows import NumberedWindows, TcpByDefault, dial_by_hand
from tests.comm.transport_contract import (
    TIMEOUT_S,
    TOKEN,
    PlannedHandler,
    TransportContract,
    eventually,
    mapped,
)
from tests.comm.unix_contract import line_of, num_fds, run_script
from torch_eaas.access import OPEN, Access
from torch_eaas.comm.frames import MAX_FDS, receive_frame, send_frame
from torch_eaas.comm.socket_transport import SocketTransport
from torch_eaas.comm.tcp_sockets import host_and_port
from torch_eaas.comm.transport import Link, Listener, Transport
from torch_eaas.errors import (
    AccessDenied,
    HandshakeRefused,
    PeerGone,
    PeerTimeout,
    TransportError,
)


class TestPlain(TransportContract):
    @pytest.fixture
    @override
    def server(self) -> Transport:
        return TcpByDefault(NumberedWindows(), OPEN, OPEN)

    @pytest.fixture
    @override
    def client(self, server: Transport) -> Transport:
        return server

    def test_the_address_names_the_port_that_was_taken(self, listener: Listener) -> None:
        host, port = host_and_port(listener.address)
        assert listener.address == f"tcp://{host}:{port}"
        assert (host, port > 0) == ("127.0.0.1", True)

    def test_a_call_has_a_deadline_and_a_late_answer_is_read_by_nobody(
        self, link: Link, handler: PlannedHandler
    ) -> None:
        with pytest.raises(PeerTimeout, match=r"bytes of a frame came in 0\.05 s"):
            link.call("hang", {}, timeout=0.05)
        handler.may_answer.set()
        assert link.closed
        with pytest.raises(PeerGone, match="is closed"):
            link.call("echo", {}, timeout=TIMEOUT_S)

    def test_no_lifeline_is_handed_out_to_another_host(self, link: Link) -> None:
        with pytest.raises(HandshakeRefused, match="AssertionError"):
            # it is no verb of the handler
            link.call("lifeline", {}, timeout=TIMEOUT_S)

    def test_a_link_closes_when_the_servers_process_is_killed(self, client: Transport) -> None:
        process = run_script(
            "from tests.comm.numbered_windows import *\n"
            "transport = TcpByDefault(NumberedWindows(), OPEN, OPEN)",
            "listener = transport.listen('', PlannedHandler(transport))\n"
            "print(listener.address, flush=True)\n"
            "sys.stdin.read()\n",
        )
        with process:
            link = client.dial(line_of(process), TIMEOUT_S)
            assert link.call("echo", {"n": 1}, timeout=TIMEOUT_S)[0]["echo"] == {"n": 1}
            assert not link.closed
            process.send_signal(signal.SIGKILL)
            assert eventually(lambda: link.closed)
            with pytest.raises(PeerGone):
                link.call("echo", {}, timeout=TIMEOUT_S)
            link.close()

    @pytest.mark.parametrize(
        ("told", "match"),
        [
            ([99], "there is no window 99"),
            (["x"], "there is no window 'x'"),
            (64, "windows are a list of sizes, got 64"),
            (None, "windows are a list of sizes, got None"),
            ([0] * (MAX_FDS + 1), f"at most {MAX_FDS} windows, got {MAX_FDS + 1}"),
        ],
        ids=str,
    )
    def test_windows_that_are_none_are_refused_with_a_text(
        self, told: object, match: str, listener: Listener
    ) -> None:
        with dial_by_hand(listener.address) as bad:
            for _ in range(2):
                send_frame(bad, {"verb": "echo", "windows": told})
                assert match in receive_frame(bad, TIMEOUT_S)[0]["error"]

    def test_a_window_of_another_transport_is_refused_by_both_names(
        self, listener: Listener
    ) -> None:
        with dial_by_hand(listener.address) as bad:
            send_frame(bad, {"verb": "echo", "windows": [64], "transport": "nvshmem"})
            text = receive_frame(bad, TIMEOUT_S)[0]["error"]
        assert "the client's windows are nvshmem's, this server's are numbered's" in text

    def test_over_a_unix_socket_it_passes_windows_too_and_takes_no_descriptor(
        self, server: Transport, handler: PlannedHandler, tmp_path: Path
    ) -> None:
        listener = server.listen(f"unix:{tmp_path / 's'}", handler)
        link = server.dial(listener.address, TIMEOUT_S)
        mine = server.create_window(64)
        _, [theirs] = link.call("handshake", {"size": 8}, [mine], timeout=TIMEOUT_S)
        assert bytes(mapped(mine)[:3]) == b"hi!"
        assert bytes(mapped(theirs)[-2:]) == b"yo"
        link.close()
        before = num_fds()
        with socket.socket(socket.AF_UNIX) as bad:
            bad.connect(str(tmp_path / "s"))
            fd = os.memfd_create("x")
            send_frame(bad, {"verb": "echo", "windows": [0]}, [fd])
            os.close(fd)
            text = receive_frame(bad, TIMEOUT_S)[0]["error"]
        assert "windows of numbered are told in words, and this frame brings 1 descr" in text
        listener.close()
        assert eventually(lambda: num_fds() <= before)


class TestTls(TransportContract):
    @pytest.fixture
    @override
    def server(self, certified: Access, trusting: Access) -> Transport:
        return TcpByDefault(NumberedWindows(), certified, trusting)

    @pytest.fixture
    @override
    def client(self, server: Transport) -> Transport:
        return server

    def test_the_address_says_that_tls_is_spoken(self, listener: Listener) -> None:
        assert listener.address.startswith("tls://127.0.0.1:")

    def test_frames_larger_than_a_record_come_whole(self, link: Link) -> None:
        # the token was shown: none is asked for here
        link.call("echo", {}, timeout=TIMEOUT_S)
        body = {"text": "x" * 1_000_000}
        assert link.call("echo", body, timeout=TIMEOUT_S)[0]["echo"] == body

    def test_between_calls_nothing_comes_that_looks_like_an_end(self, link: Link) -> None:
        # a server that sent tickets for sessions would have sent them by the first answer
        link.call("echo", {}, timeout=TIMEOUT_S)
        time.sleep(0.05)
        assert not link.closed

    def test_a_server_with_another_certificate_is_not_told_the_token(
        self, server: Transport, listener: Listener, tmp_path: Path
    ) -> None:
        other, _ = make_certificate(tmp_path, "other")
        for authority in (None, other):
            with pytest.raises(AccessDenied, match=r"told no token: .*verify failed.*; --tls-auth"):
                SocketTransport.dial(
                    server,  # type: ignore[arg-type]  # its own dial gives the right authority
                    listener.address,
                    TIMEOUT_S,
                    Access(token=TOKEN, tls_authority=authority),
                )

    def test_a_certificate_of_another_name_is_not_told_the_token(
        self, client: Transport, listener: Listener
    ) -> None:
        with pytest.raises(AccessDenied, match=r"verify failed.*not valid for 'localhost'"):
            client.dial(listener.address.replace("127.0.0.1", "localhost"), TIMEOUT_S)

    def test_a_plain_caller_and_one_that_says_nothing_hold_up_nobody(
        self, link: Link, listener: Listener, handler: PlannedHandler
    ) -> None:
        with dial_by_hand(listener.address) as plain, dial_by_hand(listener.address):
            send_frame(plain, {"verb": "echo"})
            link.call("echo", {}, timeout=TIMEOUT_S)
            with pytest.raises(TransportError):
                # an alert, or the end
                receive_frame(plain, TIMEOUT_S)
        # who did not come in is not told of
        assert handler.ended == []

    def test_closing_does_not_wait_for_who_says_nothing(
        self, server: Transport, handler: PlannedHandler
    ) -> None:
        listener = server.listen("", handler)
        with dial_by_hand(listener.address) as silent:
            time.sleep(0.05)
            began = time.monotonic()
            listener.close()
            assert time.monotonic() - began < 0.9
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(1) == b""
