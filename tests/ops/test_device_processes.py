"""A device client, its kernels in the interpreter, against real host-driven servers in processes.

Windows are ``shared_memory``'s own, opened by the real handshake; one end knows nothing of the
other but their bytes.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple, Self

import pytest
import torch

from tests.ops.device_ends import DeviceClient, Part, Windows
from tests.ops.host_end import SPEC, TIMEOUT_S, answer_of, open_by_hand, script
from tests.ops.implementations import use_kernels
from tests.ops.processes import host_end, needs_x86, told
from tests.protocol.record_traces import CLIENT, LAYERS, D, E, K, ScalingExperts
from torch_eaas.client import Client
from torch_eaas.client_pairs import Connection
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.ops.signal import Waited
from torch_eaas.protocol.layout import REQUEST_HEADER, Status
from torch_eaas.server import ExpertServer

pytestmark = needs_x86

NOTHING, ARRIVED, TIMED_OUT, ABORTED, REFUSED, _ = Waited
MANY = 10**6
"""Looks that take minutes: what is waited for comes much sooner."""

FEW = 30
BUDGET_US = 60_000_000


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)


def windows_of(conn: Connection) -> Windows:
    return Windows(conn._requests, conn._replies, conn.instance, conn.epoch)


class HostServer(NamedTuple):
    """A server's process, and where it is."""

    process: subprocess.Popen[str]
    address: str


@pytest.fixture(scope="module")
def servers() -> Iterator[list[HostServer]]:
    """Two servers: a good one, and one that dies before its second reply word."""
    with host_end("serve", 0) as good, host_end("serve", 2) as dying:
        yield [HostServer(process, told(process)) for process in (good, dying)]


INSTANCES = itertools.count(CLIENT + 1)


class Opened:
    """A device client with pairs to servers, each by a handshake and of an instance of its own."""

    def __init__(self, *servers: HostServer, instance: int | None = None) -> None:
        self.client = DeviceClient(SPEC)
        self.conns = [
            open_by_hand(server.address, instance or next(INSTANCES)) for server in servers
        ]
        for p, conn in enumerate(self.conns):
            self.client.open(p, windows_of(conn))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for conn in self.conns:
            conn.link.close()

    def ask(self, number: int, slots: dict[int, int]) -> torch.Tensor:
        """Send a request of the script to some pairs, each in its slot."""
        layer, x, ids, weights = script()[number]
        parts = {p: Part(slot, range(len(x)), ids, weights) for p, slot in slots.items()}
        return self.client.send(layer, torch.tensor(x), parts, budget_us=BUDGET_US)

    def answers(self, number: int, slots: dict[int, int]) -> bool:
        """Return whether these pairs' slots hold the right answer."""
        request = script()[number]
        return all(
            self.client.rows(p, slot, len(request[1])).tolist() == answer_of(request)
            for p, slot in slots.items()
        )


def test_a_device_client_asks_two_pairs_of_a_host_driven_server_in_one_launch(
    servers: list[HostServer],
) -> None:
    with Opened(servers[0], servers[0]) as world:
        for number in range(len(script())):
            slots = {0: number % 2, 1: 1 - number % 2}
            counts_P = world.ask(number, slots)
            waited, replies_PF = world.client.wait(counts_P, MANY)
            assert waited == [ARRIVED, ARRIVED, NOTHING]
            assert replies_PF[:2, 0].tolist() == [conn.instance for conn in world.conns]
            assert world.answers(number, slots)
        assert world.client.abort.tolist() == [0]


def host_request_window() -> bytes:
    """Return what a host-driven client has in its request window after the same script."""
    with ExpertServer(ScalingExperts(lambda: None), ServerConfig(name="local")) as server:
        server.serve_in_background()
        config = ClientConfig(hidden_size=D, top_k=K, max_tokens=3, max_micro_batches=1)
        with Client(config, servers=[server.address], instance=CLIENT) as client:
            for layer, x, ids, weights in script():
                tensors = (torch.tensor(x), torch.tensor(ids), torch.tensor(weights))
                client.combine(client.dispatch(layer, *tensors, num_experts=E))
            [conn] = client._connections.live.values()
            assert conn.spec == SPEC
            return bytes(conn._requests)


def without_budget(window: bytes) -> bytes:
    """Return a request window whose slots' budgets are 0: that is time, and differs."""
    data = bytearray(window)
    for slot in range(SPEC.slots):
        at = SPEC.request_slot(slot)
        fields = list(REQUEST_HEADER.unpack_from(data, at))
        fields[4] = 0
        REQUEST_HEADER.pack_into(data, at, *fields)
    return bytes(data)


def test_both_kinds_of_client_leave_the_same_bytes_in_a_request_window(
    servers: list[HostServer],
) -> None:
    with Opened(servers[0], instance=CLIENT) as world:
        for number in range(len(script())):
            # a host-driven client takes the slot that it freed last
            counts_P = world.ask(number, {0: 0})
            assert world.client.wait(counts_P, MANY)[0][0] == ARRIVED
        ours = bytes(world.conns[0]._requests)
        assert without_budget(ours) == without_budget(host_request_window())


def test_a_frame_of_another_epoch_is_answered_with_stale_and_aborts_the_step(
    servers: list[HostServer],
) -> None:
    with Opened(servers[0], servers[0]) as world:
        windows = windows_of(world.conns[1])
        world.client.open(1, windows._replace(epoch=windows.epoch + 1))
        waited, replies_PF = world.client.wait(world.ask(0, {0: 0, 1: 0}), MANY)
        # the server echoes its own epoch, which is not what this client's table says
        assert waited == [ARRIVED, Waited.STRANGE, NOTHING]
        assert replies_PF[1, 1:5].tolist() == [1, 1, 0, Status.STALE]
        text = world.client.text(1, 0, int(replies_PF[1, 5]))
        assert text.startswith(
            f"the frame is of instance {windows.instance:016x}, epoch 2, sequence 1"
        )
        assert world.client.abort.tolist() == [1]


def test_an_expert_that_is_not_held_is_a_refusal(servers: list[HostServer]) -> None:
    with Opened(servers[0]) as world:
        parts = {0: Part(0, [0], [[E, 0]], [[1.0, 1.0]])}
        counts_P = world.client.send(LAYERS[0], torch.ones(1, D), parts, budget_us=BUDGET_US)
        waited, replies_PF = world.client.wait(counts_P, MANY)
        assert waited[0] == REFUSED
        assert replies_PF[0, 4] == Status.UNKNOWN_EXPERT
        assert (
            world.client.text(0, 0, int(replies_PF[0, 5]))
            == "layer 1: experts [4] are not held here"
        )


def test_a_server_that_dies_between_payload_and_word_costs_one_wait_and_the_step_is_replayed(
    servers: list[HostServer],
) -> None:
    with Opened(*servers) as world:
        client = world.client
        slots = {0: 0, 1: 0}
        assert client.wait(world.ask(0, slots), MANY)[0] == [ARRIVED, ARRIVED, NOTHING]
        assert world.answers(0, slots)

        # its second answer lies there but for the word
        counts_P = world.ask(1, slots)
        deadline = time.monotonic() + TIMEOUT_S
        while not world.conns[1].link.closed and time.monotonic() < deadline:
            time.sleep(0.01)
        assert world.answers(1, {1: 0})
        waited, replies_PF = client.wait(counts_P, FEW)
        assert waited == [ARRIVED, TIMED_OUT, NOTHING]
        # nothing of a frame without its word is looked at
        assert replies_PF[1].tolist() == [0] * 8
        assert client.abort.tolist() == [1]

        # the stages behind it do nothing, and do not wait
        before = [bytes(conn._requests) for conn in world.conns]
        words_PS = client.tables.words_PS.clone()
        counts_P = world.ask(2, {0: 1})
        # nobody waited, so what failed before is what stands there
        assert client.wait(counts_P, MANY)[0] == waited
        assert [bytes(conn._requests) for conn in world.conns] == before
        assert torch.equal(client.tables.words_PS, words_PS)

        # the host sends the dead server's share to the other one, and the step runs again
        client.begin()
        counts_P = world.ask(1, {0: 0})
        assert client.wait(counts_P, MANY)[0] == [ARRIVED, NOTHING, NOTHING]
        assert world.answers(1, {0: 0})


def test_a_late_answer_frees_its_slot_and_is_read_by_nobody(servers: list[HostServer]) -> None:
    process = servers[0].process
    with Opened(servers[0]) as world:
        client = world.client
        assert client.wait(world.ask(0, {0: 0}), MANY)[0][0] == ARRIVED
        process.send_signal(signal.SIGSTOP)
        counts_P = world.ask(1, {0: 0})
        assert client.wait(counts_P, FEW)[0][0] == TIMED_OUT

        # the slot is busy as long as the answer is missing: a dispatch waits, bounded
        client.begin()
        words_PS = client.tables.words_PS.clone()
        world.ask(2, {0: 0})
        assert client.abort.tolist() == [1]
        assert torch.equal(client.tables.words_PS, words_PS)

        client.begin()
        process.send_signal(signal.SIGCONT)
        layer, x, ids, weights = script()[2]
        part = Part(0, range(len(x)), ids, weights)
        counts_P = client.send(layer, torch.tensor(x), {0: part}, budget_us=BUDGET_US, looks=MANY)
        # what it finds is the answer to its own request, not the late one
        assert client.wait(counts_P, MANY)[0][0] == ARRIVED
        assert world.answers(2, {0: 0})
