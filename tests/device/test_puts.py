"""Device ends on NVSHMEM: what they stage is put, and pairs come and go in the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from tests.comm.fake_nvshmem import FakeNvshmem, make_wheel
from tests.comm.transport_contract import eventually
from tests.served import LAYERS, D, E, K, batch, oracle
from tests.served_slabs import SPEC, T, server_of, slab
from torch_eaas.access import Access
from torch_eaas.comm import nvshmem_checks
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.nvshmem import Far, NvshmemConfig, NvshmemWorld
from torch_eaas.comm.nvshmem_library import NvshmemLibrary
from torch_eaas.comm.nvshmem_transport import NvshmemTransport
from torch_eaas.config import ClientConfig
from torch_eaas.device.client import DeviceClient
from torch_eaas.device.puts import Puts

PES = 3
CPU = torch.device("cpu")
PATIENT = timedelta(seconds=30)
TOKEN = "sesame-0123456789"


class MappedWorld(NvshmemWorld):
    """A PE among others of this process: puts go by the address that NVSHMEM would find."""

    fakes: list[FakeNvshmem]

    @override
    def far_window(self, pe: int) -> Far:
        far = super().far_window(pe)
        return Far(self.fakes[self.config.pe].reach(far.window, self.fakes[pe]), pe)


@pytest.fixture
def transports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[NvshmemTransport]:
    """A client and two servers that started together."""
    for name in ("NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_DISABLE_DATA_DIRECT"):
        monkeypatch.setenv(name, "?")
    lib = make_wheel(tmp_path / "nvshmem", "3.6.5", "libnvshmem_device.bc")
    monkeypatch.setattr(nvshmem_checks, "wheel_folders", lambda: [lib])
    fakes = [FakeNvshmem() for _ in range(PES)]
    monkeypatch.setattr(MappedWorld, "fakes", fakes, raising=False)
    made = []
    for pe, fake in enumerate(fakes):
        library = NvshmemLibrary(0, ibgda=False, modules=fake.modules)
        role: Any = "server" if pe else "client"
        config = NvshmemConfig(role=role, pe=pe, num_pes=PES)
        world = MappedWorld.open(config, SPEC, lambda _: b"7" * 128, library=library)
        made.append(NvshmemTransport(world))
    return made


@pytest.fixture(params=["", "tcp://127.0.0.1:0"], ids=["unix", "TCP"])
def client(
    transports: list[NvshmemTransport], request: pytest.FixtureRequest
) -> Iterator[DeviceClient]:
    access = Access(token=TOKEN)
    config = ClientConfig(
        hidden_size=D,
        top_k=K,
        max_tokens=T,
        max_micro_batches=1,
        graph_wait=timedelta(seconds=5),
        access=access,
    )
    with ExitStack() as stack:
        addresses = []
        for pe in (1, 2):
            server = server_of(
                slab(),
                transport=transports[pe],
                name=f"s{pe}",
                address=request.param,
                access=access,
            )
            addresses.append(stack.enter_context(server.serve_in_background()).address)
        made = DeviceClient(config, servers=addresses, transport=transports[0])
        stack.enter_context(made)
        made.wait_ready(LAYERS, E, PATIENT)
        assert eventually(lambda: len(made._connections.live) == 2)
        yield made


def ask(client: DeviceClient, num_tokens: int) -> None:
    for layer in LAYERS:
        x, ids, w = batch(num_tokens, layer)
        ticket = client.dispatch(layer, x, ids, w, num_experts=E)
        got = client.combine(ticket).double()
        torch.testing.assert_close(got, oracle(layer, x, ids, w), rtol=1e-5, atol=1e-5)


def test_layers_are_answered_by_puts(client: DeviceClient) -> None:
    for num_tokens in (1, T):
        ask(client, num_tokens)
    # both servers' windows were reached by puts
    rows = client._tables.puts_PQ[:, :2].tolist()
    assert sorted(pe for window, pe in rows if window) == [1, 2]
    assert all(conn.link.closed is False for conn in client._connections.live.values())


def test_a_pair_that_opens_anew_lies_in_the_same_memory_and_answers(client: DeviceClient) -> None:
    ask(client, T)
    ask(client, 1)
    connections = client._connections
    before = {conn.name: conn for conn in connections.live.values()}
    lost = before["s1"]
    connections.lose(lost, is_gone=False)
    # while kernels may be using the memory, no other pair gets it
    assert connections.left.holds_up(lost.server.instance)
    client.refresh()
    assert not connections.left.holds_up(lost.server.instance)
    assert eventually(lambda: "s1" in connections.live)
    again = connections.live["s1"]
    assert again.epoch > lost.epoch
    assert again.row[:2] == lost.row[:2]
    assert again.put_row == lost.put_row
    for num_tokens in (T, 1, T):
        ask(client, num_tokens)
    assert set(connections.live) == set(before)
    assert connections.live["s1"] is again


def test_with_other_transports_it_is_no_stage() -> None:
    puts = Puts(LoopbackTransport(), CPU)
    assert not puts.is_needed
    # not even looked at
    nothing: Any = None
    puts.send_requests(nothing, nothing, nothing, nothing)
    puts.send_replies(nothing, nothing, nothing, nothing, nothing)
    puts.settle()
