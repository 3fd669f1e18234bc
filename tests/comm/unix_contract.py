"""What transports over a unix socket promise beyond the contract: one host, several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.comm.transport_contract import (
    TIMEOUT_S,
    PlannedHandler,
    TransportContract,
    eventually,
    mapped,
)
from torch_eaas.comm.transport import Link, Listener, Transport
from torch_eaas.errors import HandshakeRefused, PeerGone, PeerTimeout

SCRIPT = """
import os, sys, time
from tests.comm.transport_contract import PlannedHandler, mapped
{makes}
assert "torch" not in sys.modules
"""


ASKS = """
link = transport.dial(sys.argv[1], 5)
window = transport.create_window(64)
_, [theirs] = link.call("handshake", {"size": 64}, [window], timeout=5)
replies, requests = mapped(window).cast("Q"), mapped(theirs).cast("Q")
print("open", flush=True)
total = 0
for n in range(1, 51):
    requests[0] = n
    assert transport.wait(lambda: replies[1] == n * n, 5)
    total += replies[1]
print(total, flush=True)
time.sleep(60)
"""
"""A client that asks for squares."""


def answer_squares(server: Transport, requests: memoryview, replies: memoryview) -> None:
    """Answer what ``ASKS`` asks."""
    for n in range(1, 51):
        assert server.wait(lambda n=n: requests[0] == n, TIMEOUT_S)
        replies[1] = n * n


def run_script(makes: str, body: str, *args: str) -> subprocess.Popen[str]:
    """Start a process without torch that has a transport, which ``makes`` assigns."""
    # forking is what some of these scripts are for
    options = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    return subprocess.Popen(
        [sys.executable, *options, "-c", SCRIPT.format(makes=makes) + body, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def num_shared_maps() -> int:
    """Return how many windows this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:")


class UnixTransportContract(TransportContract):
    """Subclasses say how another process makes the transport."""

    MAKES = ""
    """Lines of Python that assign ``transport``."""

    def run(self, body: str, *args: str) -> subprocess.Popen[str]:
        return run_script(self.MAKES, body, *args)

    def test_a_call_has_a_deadline_and_a_late_answer_is_read_by_nobody(
        self, link: Link, handler: PlannedHandler
    ) -> None:
        start = time.monotonic()
        with pytest.raises(PeerTimeout, match=r"bytes of a frame came in 0\.05 s"):
            link.call("hang", {}, timeout=0.05)
        assert time.monotonic() - start < 2
        handler.may_answer.set()
        # a late answer must not be taken for the next call's
        assert link.closed
        with pytest.raises(PeerGone):
            link.call("echo", {}, timeout=TIMEOUT_S)

    # -- processes -----------------------------------------------------------------------------

    def test_a_link_closes_when_the_servers_process_is_killed(self, client: Transport) -> None:
        process = self.run(
            "listener = transport.listen('', PlannedHandler(transport))\n"
            "print(listener.address, flush=True)\n"
            "sys.stdin.read()\n"
        )
        with process:
            link = client.dial(line_of(process), TIMEOUT_S)
            window = client.create_window(128)
            view = mapped(window)
            _, [theirs] = link.call("handshake", {"size": 128}, [window], timeout=TIMEOUT_S)
            assert not link.closed
            process.send_signal(signal.SIGKILL)
            assert eventually(lambda: link.closed)
            with pytest.raises(PeerGone):
                link.call("echo", {}, timeout=TIMEOUT_S)
            # the memory outlives the process that made it, to be read and written
            made_by_it = mapped(theirs)
            assert bytes(view[:3]) == b"hi!"
            assert bytes(made_by_it[-2:]) == b"yo"
            view[:3] = made_by_it[:3] = b"out"
            assert bytes(made_by_it) == b"out" + bytes(123) + b"yo"
            link.close()
            for open_window in (window, theirs):
                open_window.close()

    def test_a_call_under_way_ends_when_the_servers_process_is_killed(
        self, client: Transport
    ) -> None:
        process = self.run(
            "listener = transport.listen('', PlannedHandler(transport))\n"
            "print(listener.address, flush=True)\n"
            "sys.stdin.read()\n"
        )
        with process:
            link = client.dial(line_of(process), TIMEOUT_S)
            timer = threading.Timer(0.1, process.kill)
            timer.start()
            start = time.monotonic()
            with pytest.raises(PeerGone, match=r"closed|ended"):
                link.call("hang", {}, timeout=TIMEOUT_S)
            assert time.monotonic() - start < TIMEOUT_S / 2
            timer.join()

    def test_the_handler_hears_that_a_clients_process_was_killed(
        self, listener: Listener, handler: PlannedHandler
    ) -> None:
        process = self.run(
            "link = transport.dial(sys.argv[1], 5)\n"
            "window = transport.create_window(64)\n"
            "link.call('handshake', {'size': 64}, [window], timeout=5)\n"
            "print('open', flush=True)\n"
            "sys.stdin.read()\n",
            listener.address,
        )
        with process:
            assert line_of(process) == "open"
            [(peer, view)] = handler.came.items()
            assert handler.ended == []
            process.send_signal(signal.SIGKILL)
            assert eventually(lambda: handler.ended == [peer])
            view[0:1] = b"x"

    def test_processes_come_exchange_words_and_are_killed_while_another_pair_goes_on(
        self, server: Transport, client: Transport, listener: Listener, handler: PlannedHandler
    ) -> None:
        stays = client.dial(listener.address, TIMEOUT_S)
        window = client.create_window(64)
        answer, [theirs] = stays.call("handshake", {"size": 64}, [window], timeout=TIMEOUT_S)
        for turn in range(2):
            known = set(handler.came)
            with self.run(ASKS, listener.address) as process:
                assert line_of(process) == "open"
                [peer] = set(handler.came) - known
                requests, replies = (each[peer].cast("Q") for each in (handler.went, handler.came))
                answer_squares(server, requests, replies)
                assert line_of(process) == str(sum(n * n for n in range(1, 51)))
                process.send_signal(signal.SIGKILL)
                assert eventually(lambda peer=peer: peer in handler.ended)
            # what was the killed process's too is memory as before
            requests[0] = replies[1] = 7
            mapped(theirs)[8] = turn + 1
            assert handler.went[answer["peer"]][8] == turn + 1
            assert not stays.closed
        for opened in (stays, window, theirs):
            opened.close()

    def test_a_forked_child_ends_nothing_of_its_parents(
        self, listener: Listener, handler: PlannedHandler, tmp_path: Path
    ) -> None:
        process = self.run(
            "link = transport.dial(sys.argv[1], 5)\n"
            "own = transport.listen('unix:' + sys.argv[2], PlannedHandler(transport))\n"
            "window = transport.create_window(64)\n"
            "view = mapped(window)\n"
            "_, [theirs] = link.call('handshake', {'size': 64}, [window], timeout=5)\n"
            "pid = os.fork()\n"
            "if pid == 0:\n"
            "    for thing in (link, own, window, theirs):\n"
            "        thing.close()\n"
            "    sys.exit(0)\n"
            "assert os.waitpid(pid, 0)[1] == 0\n"
            "os.fstat(window.fd), os.fstat(theirs.fd)\n"
            "mapped(theirs)[0:5] = b'alive'\n"
            "view[0:5] = b'alive'\n"
            "link.call('echo', {}, timeout=5)\n"
            "transport.dial(own.address, 5).call('echo', {}, timeout=5)\n"
            "own.close()\n"
            "print('alive', flush=True)\n"
            "sys.stdin.read()\n",
            listener.address,
            str(tmp_path / "own"),
        )
        with process:
            assert line_of(process) == "alive"
            [peer] = handler.came
            assert bytes(handler.came[peer][:5]) == bytes(handler.went[peer][:5]) == b"alive"
            assert handler.ended == []
            assert process.communicate(timeout=TIMEOUT_S) == ("", None)
            assert process.returncode == 0
        assert list(tmp_path.iterdir()) == []

    def test_a_hundred_connections_and_handshakes_leave_no_descriptor_and_no_mapping(
        self, client: Transport, listener: Listener, handler: PlannedHandler
    ) -> None:
        def once() -> None:
            link = client.dial(listener.address, TIMEOUT_S)
            window = client.create_window(128)
            _, windows = link.call("handshake", {"size": 64}, [window], timeout=TIMEOUT_S)
            with pytest.raises(HandshakeRefused):
                link.call("refuse", {"who": "me"}, [window], timeout=TIMEOUT_S)
            for opened in (window, *windows, link):
                opened.close()
            # a map has a descriptor of its own, as long as somebody looks into it
            handler.came.clear()
            handler.went.clear()

        before = num_fds(), num_shared_maps()
        for _ in range(100):
            once()
        assert eventually(lambda: (num_fds(), num_shared_maps()) <= before)
