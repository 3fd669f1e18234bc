"""A device server, its kernels in the interpreter, against a real client in another process."""

from __future__ import annotations

import time

import pytest
import torch

from tests.ops.device_ends import DeviceServer, Windows
from tests.ops.host_end import FORGER, SPEC, TIMEOUT_S, answer_of, script
from tests.ops.implementations import use_kernels
from tests.ops.processes import host_end, needs_x86, told
from tests.protocol.record_traces import D, E, ScalingExperts
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.config import ServerConfig
from torch_eaas.protocol.layout import HEADER_BYTES, Status
from torch_eaas.server import HostPath
from torch_eaas.server_control import ServerControl
from torch_eaas.server_pairs import ServerPair

pytestmark = needs_x86


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)


class DeviceEndpoint:
    """A device server behind a real control endpoint."""

    def __init__(self) -> None:
        experts = ScalingExperts(lambda: None)
        keys = [(layer, e) for layer, ids in experts.holdings.items() for e in ids]
        scales = {(layer, e): float(layer + e) for layer, e in keys}
        self.server = DeviceServer(SPEC, scales, E)
        transport = SharedMemoryTransport()
        # its pairs are served by hand, see serve
        path = HostPath(experts, ServerConfig(), transport, time.monotonic)
        self._control = ServerControl(
            config=ServerConfig(name="device"),
            instance=1,
            transport=transport,
            hidden_size=D,
            holdings=lambda: experts.holdings,
            path=path,
            drain=lambda: None,
            clock=time.monotonic,
        )
        self.listener = transport.listen("", self._control)
        self.pairs: list[ServerPair] = []

    def serve(self, answers: int) -> list[int]:
        """Serve until so many requests were answered; return their statuses."""
        statuses: list[int] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(statuses) < answers and time.monotonic() < deadline:
            for pair in self._control.pairs:
                if pair not in self.pairs:
                    windows = Windows(pair._requests, pair._replies, pair.instance, pair.epoch)
                    self.server.open(len(self.pairs), windows)
                    self.server.tables.scanned_P[len(self.pairs)] = _microseconds()
                    self.pairs.append(pair)
            statuses += self.server.step(_microseconds)
        return statuses


def _microseconds() -> int:
    return time.monotonic_ns() // 1000


def test_a_host_driven_client_is_served_by_a_device_server_and_a_forged_frame_is_refused() -> None:
    endpoint = DeviceEndpoint()
    try:
        with host_end("ask", endpoint.listener.address) as client:
            expected = [Status.OK] * len(script()) + [Status.STALE]
            assert endpoint.serve(len(expected)) == expected
            assert [told(client) for _ in script()] == [answer_of(request) for request in script()]
            *header, text = told(client)
    finally:
        endpoint.listener.close()

    # the client took slot 0 each time; slot 1 was never written
    window = bytes(endpoint.pairs[0]._replies)
    assert window[:16] == bytes([2, len(script())]) + bytes(14)
    assert not any(window[SPEC.reply_slot(1) :])
    rows = window[SPEC.reply_slot(0) + HEADER_BYTES :]
    # the last answer has one row; behind it lie two of the one before
    expected_TD = torch.tensor(answer_of(script()[4]) + answer_of(script()[3])[1:])
    assert rows[: 3 * D * 4] == expected_TD.numpy().tobytes()

    assert text == "instance, epoch or sequence is not this window's, this word's"
    assert header == [FORGER, 1, 1, 0, Status.STALE, len(text), 0, 0]
