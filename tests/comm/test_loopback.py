"""Loopback keeps the contract, between threads."""

from __future__ import annotations

import threading
import time

import pytest
from typing_extensions import override

from tests.comm.transport_contract import TIMEOUT_S, HostWindowContract, PlannedHandler, eventually
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.errors import PeerGone, TransportError


class TestLoopback(HostWindowContract):
    @pytest.fixture
    @override
    def server(self) -> Transport:
        return LoopbackTransport()

    @pytest.fixture
    @override
    def client(self, server: Transport) -> Transport:
        return server


def test_transports_of_their_own_do_not_meet() -> None:
    here, there = LoopbackTransport(), LoopbackTransport()
    listener = here.listen("loopback:a", PlannedHandler(here))
    with pytest.raises(PeerGone, match="nobody listens at loopback:a"):
        there.dial("loopback:a", TIMEOUT_S)
    other = there.listen("loopback:a", PlannedHandler(there))
    other.close()
    listener.close()


def test_a_window_within_one_process_has_no_descriptor() -> None:
    with pytest.raises(TransportError, match="no file descriptor to hand on"):
        _ = LoopbackTransport().create_window(8).fd


def test_everybody_who_waits_is_woken_by_one_ring() -> None:
    transport = LoopbackTransport()
    words = [0]
    woken: list[float] = []

    def wait() -> None:
        assert transport.wait(lambda: words[0] == 1, TIMEOUT_S)
        woken.append(time.monotonic())

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    words[0] = 1
    rung = time.monotonic()
    transport.ring()
    assert eventually(lambda: len(woken) == 4)
    assert max(woken) - rung < TIMEOUT_S / 2
    for thread in threads:
        thread.join()
