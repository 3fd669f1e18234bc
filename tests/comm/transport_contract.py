"""What every transport promises: one suite that each of them passes."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from typing_extensions import override

from torch_eaas.access import Access
from torch_eaas.comm.transport import Handler, Json, Link, Listener, Reply, Transport
from torch_eaas.comm.window import Window
from torch_eaas.errors import (
    AccessDenied,
    ConfigError,
    HandshakeRefused,
    PeerGone,
    TransportError,
)

TIMEOUT_S = 10.0
TOKEN = "a-token-of-this-test"


def eventually(is_so: Callable[[], bool], seconds: float = TIMEOUT_S) -> bool:
    """Wait until something is so; return whether it came to be."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def mapped(window: Window) -> memoryview:
    """Return a window's bytes by its address, as kernels see them, wherever its memory is."""
    memory = window.memory
    found = (ctypes.c_ubyte * memory.nbytes).from_address(memory.address)
    found.memory = memory
    return memoryview(found).cast("B")


class PlannedHandler(Handler):
    """A server's side of control calls, as the tests need it.

    Args:
        transport: Makes the windows that ``handshake`` returns.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.came: dict[int, memoryview] = {}
        self.went: dict[int, memoryview] = {}
        self.ended: list[int] = []
        self.may_answer = threading.Event()
        self.access = Access()

    @override
    def admits(self, peer: int, token: object) -> bool:
        return self.access.admits(token)

    @override
    def handle(self, peer: int, verb: str, body: Json, windows: Sequence[Window]) -> Reply:
        if verb == "echo":
            return {"echo": body, "peer": peer}, ()
        if verb == "refuse":
            raise ConfigError(f"no place for {body['who']}")
        if verb == "break":
            raise ZeroDivisionError("a fault of the handler")
        if verb == "hang":
            self.may_answer.wait(TIMEOUT_S)
            return {}, ()
        assert verb == "handshake"
        [window] = windows
        self.came[peer] = mapped(window)
        self.came[peer][:3] = b"hi!"
        mine = self._transport.create_window(body["size"])
        self.went[peer] = mapped(mine)
        self.went[peer][-2:] = b"yo"
        return {"peer": peer}, (mine,)

    @override
    def gone(self, peer: int) -> None:
        self.ended.append(peer)


class TransportContract:
    """Subclasses say how to make a transport; ``server`` and ``client`` are its two ends."""

    @pytest.fixture
    def server(self) -> Transport:
        """The transport as the server's process has it."""
        raise NotImplementedError

    @pytest.fixture
    def client(self, server: Transport) -> Transport:
        """The transport as the client's process has it."""
        raise NotImplementedError

    @pytest.fixture
    def handler(self, server: Transport) -> PlannedHandler:
        return PlannedHandler(server)

    @pytest.fixture
    def listener(self, server: Transport, handler: PlannedHandler) -> Iterator[Listener]:
        listener = server.listen("", handler)
        yield listener
        listener.close()

    @pytest.fixture
    def link(self, client: Transport, listener: Listener) -> Iterator[Link]:
        link = client.dial(listener.address, TIMEOUT_S)
        yield link
        link.close()

    # -- windows -------------------------------------------------------------------------------

    @pytest.mark.parametrize("nbytes", [1, 63, 4096, 100_000])
    def test_a_new_window_is_zeroed_and_of_the_size_asked_for(
        self, server: Transport, nbytes: int
    ) -> None:
        window = server.create_window(nbytes)
        assert window.nbytes == window.memory.nbytes == nbytes
        assert window.memory.address % 128 == 0
        assert bytes(mapped(window)) == bytes(nbytes)
        window.close()

    def test_a_window_of_no_bytes_is_refused(self, server: Transport) -> None:
        with pytest.raises(ConfigError, match="a window has at least one byte, got 0"):
            server.create_window(0)

    def test_a_handshake_passes_windows_both_ways_and_both_ends_write_into_both(
        self, client: Transport, link: Link, handler: PlannedHandler
    ) -> None:
        mine = client.create_window(256)
        answer, [theirs] = link.call("handshake", {"size": 300}, [mine], timeout=TIMEOUT_S)
        peer = answer["peer"]
        assert (mine.nbytes, theirs.nbytes) == (256, 300)
        came, went = mapped(mine), mapped(theirs)

        assert bytes(came[:4]) == b"hi!\0"
        assert bytes(went[-3:]) == b"\0yo"
        came[100:105] = b"again"
        assert bytes(handler.came[peer][100:105]) == b"again"
        went[8:16] = (0x0123456789ABCDEF).to_bytes(8, "little")
        assert handler.went[peer][8:16].cast("Q")[0] == 0x0123456789ABCDEF
        handler.went[peer][0:1] = b"!"
        assert bytes(went[0:1]) == b"!"

    def test_memory_outlives_the_window_and_the_connection(
        self, client: Transport, link: Link, listener: Listener, handler: PlannedHandler
    ) -> None:
        mine = client.create_window(128)
        came = mapped(mine)
        answer, [theirs] = link.call("handshake", {"size": 128}, [mine], timeout=TIMEOUT_S)
        went = mapped(theirs)
        for window in (mine, theirs, mine, theirs):
            window.close()
        link.close()
        listener.close()
        came[5:6] = b"x"
        assert bytes(handler.came[answer["peer"]][5:6]) == b"x"
        handler.went[answer["peer"]][7:8] = b"y"
        assert bytes(went[7:8]) == b"y"

    def test_a_closed_window_gives_no_more_memory(self, server: Transport) -> None:
        window = server.create_window(8)
        window.close()
        window.close()
        with pytest.raises(TransportError, match="this window is closed"):
            _ = window.memory

    # -- calls ---------------------------------------------------------------------------------

    def test_a_call_returns_what_the_handler_answers(self, link: Link) -> None:
        body = {"text": "caf\u00e9", "numbers": [1, 2.5, None], "nested": {"deep": [True]}}
        answer, windows = link.call("echo", body, timeout=TIMEOUT_S)
        assert answer["echo"] == body
        assert windows == []

    def test_a_refusal_carries_its_text_and_the_address_and_the_connection_lives(
        self, link: Link, listener: Listener
    ) -> None:
        for _ in range(2):
            with pytest.raises(HandshakeRefused, match=r"no place for me") as caught:
                link.call("refuse", {"who": "me"}, timeout=TIMEOUT_S)
            assert listener.address in str(caught.value)
        assert link.call("echo", {"n": 1}, timeout=TIMEOUT_S)[0]["echo"] == {"n": 1}

    def test_a_fault_of_the_handler_is_answered_too_and_the_connection_lives(
        self, link: Link
    ) -> None:
        with pytest.raises(HandshakeRefused, match="ZeroDivisionError: a fault of the handler"):
            link.call("break", {}, timeout=TIMEOUT_S)
        assert link.call("echo", {}, timeout=TIMEOUT_S)[0]["echo"] == {}

    def test_many_clients_call_at_once_and_each_gets_its_own_answers(
        self, client: Transport, listener: Listener
    ) -> None:
        peers: list[int] = []
        faults: list[Any] = []

        def call_often(number: int) -> None:
            link = client.dial(listener.address, TIMEOUT_S)
            for turn in range(20):
                answer, _ = link.call("echo", {"n": [number, turn]}, timeout=TIMEOUT_S)
                if answer["echo"] != {"n": [number, turn]}:
                    faults.append(answer)
            peers.append(answer["peer"])
            link.close()

        threads = [threading.Thread(target=call_often, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not faults
        assert len(set(peers)) == 8

    def test_a_caller_without_the_token_is_turned_away_before_its_window_is_looked_at(
        self, client: Transport, listener: Listener, handler: PlannedHandler
    ) -> None:
        handler.access = Access(token=TOKEN)
        for token in ("", TOKEN[:-1], TOKEN + "x"):
            link = client.dial(listener.address, TIMEOUT_S, Access(token=token))
            window = client.create_window(128)
            for _ in range(2):
                with pytest.raises(AccessDenied, match="token is missing or wrong") as caught:
                    link.call("handshake", {"size": 128}, [window], timeout=TIMEOUT_S)
                assert listener.address in str(caught.value)
            assert bytes(mapped(window)) == bytes(128)
            assert not link.closed
            link.close()
        assert handler.came == {}
        link = client.dial(listener.address, TIMEOUT_S, Access(token=TOKEN))
        # the handler does not see the token, so it cannot end up in a log
        assert link.call("echo", {"n": 1}, timeout=TIMEOUT_S)[0]["echo"] == {"n": 1}
        link.close()

    # -- ends ----------------------------------------------------------------------------------

    def test_a_link_is_open_until_the_server_closes(self, link: Link, listener: Listener) -> None:
        assert not link.closed
        link.call("echo", {}, timeout=TIMEOUT_S)
        assert not link.closed
        listener.close()
        assert eventually(lambda: link.closed)
        with pytest.raises(PeerGone):
            link.call("echo", {}, timeout=TIMEOUT_S)

    def test_the_handler_hears_once_that_a_client_closed(
        self, client: Transport, listener: Listener, handler: PlannedHandler
    ) -> None:
        first, second = (client.dial(listener.address, TIMEOUT_S) for _ in range(2))
        peer = first.call("echo", {}, timeout=TIMEOUT_S)[0]["peer"]
        first.close()
        assert eventually(lambda: handler.ended == [peer])
        assert first.closed
        assert not second.closed
        first.close()
        second.call("echo", {}, timeout=TIMEOUT_S)
        assert handler.ended == [peer]
        with pytest.raises(PeerGone):
            first.call("echo", {}, timeout=TIMEOUT_S)
        second.close()

    def test_the_handler_hears_of_every_client_when_the_server_closes(
        self, client: Transport, listener: Listener, handler: PlannedHandler
    ) -> None:
        links = [client.dial(listener.address, TIMEOUT_S) for _ in range(3)]
        peers = [link.call("echo", {}, timeout=TIMEOUT_S)[0]["peer"] for link in links]
        listener.close()
        listener.close()
        assert eventually(lambda: sorted(handler.ended) == sorted(peers))
        for link in links:
            link.close()

    def test_a_server_that_closes_while_a_client_dials_leaves_no_open_link(
        self, client: Transport, listener: Listener
    ) -> None:
        links: list[Link] = []
        started = threading.Event()

        def dial_on() -> None:
            while True:
                try:
                    links.append(client.dial(listener.address, TIMEOUT_S))
                except PeerGone:
                    return
                started.set()

        thread = threading.Thread(target=dial_on)
        thread.start()
        started.wait(TIMEOUT_S)
        listener.close()
        thread.join(TIMEOUT_S)
        assert links
        assert eventually(lambda: all(link.closed for link in links))
        for link in links:
            link.close()

    def test_nobody_listens_at_an_address_before_and_after(
        self, server: Transport, client: Transport, listener: Listener, handler: PlannedHandler
    ) -> None:
        address = listener.address
        listener.close()
        with pytest.raises(PeerGone, match=address):
            client.dial(address, TIMEOUT_S)
        again = server.listen(address, handler)
        assert again.address == address
        client.dial(address, TIMEOUT_S).close()
        again.close()

    def test_an_address_has_one_server(
        self, server: Transport, listener: Listener, handler: PlannedHandler
    ) -> None:
        with pytest.raises(ConfigError, match=listener.address):
            server.listen(listener.address, handler)

    def test_without_an_address_each_server_gets_its_own(
        self, server: Transport, listener: Listener, handler: PlannedHandler
    ) -> None:
        other = server.listen("", handler)
        assert other.address != listener.address
        other.close()

    def test_an_address_of_another_kind_is_refused(
        self, server: Transport, handler: PlannedHandler
    ) -> None:
        with pytest.raises(ConfigError, match=r"address is .*, got 'tcp:1'"):
            server.listen("tcp:1", handler)

    # -- waiting -------------------------------------------------------------------------------

    @pytest.mark.parametrize("waited", [0.0, 5.0], ids=["fresh", "long idle"])
    def test_a_wait_ends_at_once_when_it_is_over_already(
        self, server: Transport, waited: float
    ) -> None:
        start = time.monotonic()
        assert server.wait(lambda: True, TIMEOUT_S, waited)
        assert time.monotonic() - start < 1

    @pytest.mark.parametrize("timeout", [0.0, 0.05])
    def test_a_wait_ends_when_its_time_is_over(self, server: Transport, timeout: float) -> None:
        start = time.monotonic()
        assert not server.wait(lambda: False, timeout)
        assert timeout <= time.monotonic() - start < timeout + 2

    def test_a_wait_is_woken_by_a_word_and_a_ring(
        self, server: Transport, client: Transport, link: Link, handler: PlannedHandler
    ) -> None:
        mine = client.create_window(128)
        link.call("handshake", {"size": 128}, [mine], timeout=TIMEOUT_S)
        words = mapped(mine)[8:16].cast("Q")
        [came] = handler.came.values()

        def answer() -> None:
            time.sleep(0.02)
            came[8:16].cast("Q")[0] = 0x102
            server.ring()

        thread = threading.Thread(target=answer)
        thread.start()
        start = time.monotonic()
        assert client.wait(lambda: words[0] == 0x102, TIMEOUT_S)
        assert time.monotonic() - start < TIMEOUT_S / 2
        thread.join()


class HostWindowContract(TransportContract):
    """What is promised beyond that where windows lie in the host's memory."""

    def test_a_view_shows_what_lies_at_the_address(self, server: Transport) -> None:
        window = server.create_window(300)
        view, by_address = window.view, mapped(window)
        view[:2] = b"by"
        by_address[-3:] = b"way"
        assert bytes(by_address) == bytes(view) == b"by" + bytes(295) + b"way"
        window.close()

    def test_a_closed_window_gives_no_more_views(self, server: Transport) -> None:
        window = server.create_window(8)
        window.close()
        with pytest.raises(TransportError, match="this window is closed"):
            _ = window.view
