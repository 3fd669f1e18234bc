"""Whole steps and iterations, real ones, make no call that a CUDA graph cannot hold.

Each runs once untouched at least, which shows that the guard was on.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.served import LAYERS, WEIGHTS, D, E, I, K, batch, oracle
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.config import ClientConfig, ServerConfig, Storage
from torch_eaas.device_server import DeviceServer
from torch_eaas.device_server_iteration import DeviceIteration
from torch_eaas.errors import ConfigError
from torch_eaas.expert_slab import ExpertSlab
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.testing import forbid_syncs

MAX_TOKENS = 8
TOLERANCE = {"fp32": 1e-5, "bf16": 0.02, "fp8": 0.1}


@pytest.fixture
def iterations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let every iteration of a server run under the guard; returns a list that counts them."""
    ran: list[int] = []
    run = DeviceIteration.run

    def guarded(self: DeviceIteration) -> None:
        with forbid_syncs():
            run(self)
        ran.append(1)

    monkeypatch.setattr(DeviceIteration, "run", guarded)
    yield ran
    assert ran


def device_server(transport: LoopbackTransport, storage: Storage, spec: PairSpec) -> DeviceServer:
    slab = ExpertSlab(
        D, I, slots=len(WEIGHTS), max_layers=4, max_experts=E, storage=storage, device="cpu"
    )
    slab.update(WEIGHTS)
    config = ServerConfig(name="s0", max_pairs=2)
    return DeviceServer(slab, spec, config, transport=transport, max_requests=3)


@pytest.mark.parametrize("storage", list(TOLERANCE))
@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_a_servers_iteration_reads_nothing_back(
    storage: Storage, combine: str, iterations: list[int]
) -> None:
    config = ClientConfig(
        hidden_size=D, top_k=K, max_tokens=MAX_TOKENS, max_micro_batches=1, combine=combine
    )
    transport = LoopbackTransport()
    spec = PairSpec(hidden_size=D, top_k=K, slots=2, max_tokens=MAX_TOKENS, combine=combine)
    with device_server(transport, storage, spec) as server:
        client = Client(config, servers=[server.address], transport=transport, background=False)
        with client:
            server.step()
            for layer in LAYERS:
                for num_tokens in (1, 7):
                    x, ids, w = batch(num_tokens, num_tokens, low=-1)
                    ticket = client.dispatch(layer, x, ids, w, num_experts=E)
                    assert server.step() == 1
                    out = client.combine(ticket).double()
                    error = (out - oracle(layer, x, ids, w)).abs().max()
                    assert error <= TOLERANCE[storage] * oracle(layer, x, ids, w).abs().max()
            # a request of another width would be refused by text; an unknown layer is, too
            ticket = client.dispatch(LAYERS[0], *batch(1), num_experts=E)
            server.step()
            client.combine(ticket)
    assert len(iterations) > 5


def test_an_iteration_that_reads_a_count_is_found(
    monkeypatch: pytest.MonkeyPatch, iterations: list[int]
) -> None:
    compute = DeviceIteration._compute

    def counting(self: DeviceIteration, ready_R: object, requests: object) -> object:
        rows = compute(self, ready_R, requests)  # type: ignore[arg-type]
        if requests.num_tokens_R.sum().item() > 0:  # type: ignore[attr-defined]
            return rows
        return rows

    spec = PairSpec(hidden_size=D, top_k=K, slots=2, max_tokens=MAX_TOKENS)
    with device_server(LoopbackTransport(), "fp32", spec) as server:
        server.step()
        monkeypatch.setattr(DeviceIteration, "_compute", counting)
        with pytest.raises(ConfigError, match=r"Tensor.item\(\) waits for the device"):
            server.step()
        monkeypatch.setattr(DeviceIteration, "_compute", compute)
