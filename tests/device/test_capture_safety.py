"""Whole steps and iterations, the real ones, make no call that a CUDA graph cannot hold.

On a CPU their ops run as plain twins, which read what they like; everything around them counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.served import LAYERS, WEIGHTS, D, E, I, K, batch, oracle
from torch_eaas.client import Client
from torch_eaas.config import ClientConfig, ServerConfig, Storage
from torch_eaas.device.captured_step import CapturedStep
from torch_eaas.device.client import DeviceClient
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.device.server import DeviceServer
from torch_eaas.device.server_iteration import DeviceIteration
from torch_eaas.errors import ConfigError
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.remote_moe import RemoteExperts, RemoteMoE
from torch_eaas.routers import GroupLimitedRouter, SoftmaxTopKRouter
from torch_eaas.testing import forbid_syncs

T = 8
TOLERANCE = {"fp32": 1e-5, "bf16": 0.02, "fp8": 0.1}
PATIENT = timedelta(seconds=20)


def config_of(**options: Any) -> ClientConfig:
    return ClientConfig(hidden_size=D, top_k=K, max_tokens=T, graph_wait=PATIENT, **options)


def device_server(
    config: ClientConfig,
    held: Sequence[tuple[int, int]] = tuple(WEIGHTS),
    *,
    name: str = "s0",
    storage: Storage = "fp32",
) -> DeviceServer:
    slab = ExpertSlab(
        D, I, slots=len(held), max_layers=4, max_experts=E, storage=storage, device="cpu"
    )
    slab.update({key: WEIGHTS[key] for key in held})
    options = ServerConfig(name=name, max_pairs=2)
    return DeviceServer(slab, PairSpec.of(config), options, max_requests=3)


def guarded(work: Callable[[], object], ran: list[object]) -> Callable[[], object]:
    def run() -> object:
        with forbid_syncs():
            result = work()
        ran.append(result)
        return result

    return run


# -- the server's iteration ------------------------------------------------------------------------


@pytest.fixture
def iterations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Let every iteration of a server run under the guard; return a list that counts them."""
    ran: list[object] = []
    run = DeviceIteration.run
    monkeypatch.setattr(DeviceIteration, "run", lambda self: guarded(lambda: run(self), ran)())
    yield ran
    assert ran


@pytest.mark.parametrize("storage", list(TOLERANCE))
@pytest.mark.parametrize("combine", ["partial", "exact"])
@pytest.mark.parametrize("wire", ["fp32", "fp8"])
def test_a_servers_iteration_reads_nothing_back(
    storage: Storage, combine: Any, wire: Any, iterations: list[object]
) -> None:
    config = config_of(combine=combine, wire_dtype=wire, max_micro_batches=1)
    with (
        device_server(config, storage=storage) as server,
        Client(config, servers=[server.address]) as client,
    ):
        client.wait_ready(LAYERS, E)
        for layer in LAYERS:
            for num_tokens in (1, 7):
                given = batch(num_tokens, num_tokens, low=-1)
                ticket = client.dispatch(layer, *given, num_experts=E)
                assert server.step() == 1
                expected = oracle(layer, *given)
                error = (client.combine(ticket).double() - expected).abs().max()
                assert error <= max(TOLERANCE[storage], TOLERANCE[wire]) * expected.abs().max()
    # the first was its capture
    assert len(iterations) >= 5


def test_an_iteration_that_reads_a_count_is_found(
    monkeypatch: pytest.MonkeyPatch, iterations: list[object]
) -> None:
    compute = DeviceIteration._compute

    def counting(self: DeviceIteration, ready_R: Tensor, requests: object) -> Tensor:
        if int(ready_R.max()) < 0:
            return ready_R
        return compute(self, ready_R, requests)  # type: ignore[arg-type]

    with device_server(config_of()) as server:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceIteration, "_compute", counting)
            with pytest.raises(ConfigError, match=r"int\(tensor\) waits for the device"):
                server.step()
        server.step()


# -- the client's step -----------------------------------------------------------------------------


class Attention(nn.Module):
    """Keeps what it sees at the step's own position, as attention keeps its KV."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.position = torch.tensor([1])
        self.register_buffer("kept", torch.zeros(3, num_tokens, D))

    def forward(self, x_TD: Tensor) -> Tensor:
        self.kept.index_copy_(0, self.position, x_TD[None])
        return x_TD + self.kept.mean(0)


class Layer(nn.Module):
    def __init__(self, client: DeviceClient, layer: int, router: nn.Module) -> None:
        super().__init__()
        self.attention = Attention(T)
        experts = RemoteExperts(client, layer=layer, num_experts=E, top_k=K)
        self.moe = RemoteMoE(router, experts, shared=nn.Linear(D, D))

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.moe(self.attention(x_TD))


def layers_of(client: DeviceClient) -> list[Layer]:
    torch.manual_seed(0)
    routers = [
        SoftmaxTopKRouter(D, E, K),
        GroupLimitedRouter(D, E, K, n_group=2, topk_group=1, routed_scaling_factor=2.5),
    ]
    for router in routers:
        nn.init.normal_(router.weight)
    return [Layer(client, *each) for each in zip(LAYERS, routers, strict=True)]


def run_guarded(step: CapturedStep[Tensor]) -> Tensor:
    """Replay under the guard, from the node that begins the step to its last."""
    ran: list[object] = []
    captured = step._captured
    captured._work = guarded(captured._work, ran)  # type: ignore[assignment]
    out = step.run()
    assert ran[-1] is out
    return out


@pytest.fixture(params=[("partial", "fp32"), ("exact", "fp32"), ("partial", "fp8")], ids=str)
def device_client(request: pytest.FixtureRequest) -> Iterator[DeviceClient]:
    config = config_of(combine=request.param[0], wire_dtype=request.param[1], max_micro_batches=2)
    held = [[(layer, e) for layer in LAYERS for e in range(E) if e % 2 == i] for i in range(2)]
    servers = [device_server(config, keys, name=f"s{i}") for i, keys in enumerate(held)]
    addresses = [server.serve_in_background().address for server in servers]
    with servers[0], servers[1], DeviceClient(config, servers=addresses) as client:
        client.wait_ready(LAYERS, E)
        yield client


@torch.no_grad()
def test_a_whole_decoders_step_reads_nothing_back(device_client: DeviceClient) -> None:
    layers = layers_of(device_client)
    x_TD = batch(T)[0]

    def decode() -> Tensor:
        out_TD = x_TD
        for layer in layers:
            out_TD = layer(out_TD)
        return out_TD

    step = CapturedStep(device_client, decode)
    eager_TD = decode().clone()
    torch.testing.assert_close(run_guarded(step), eager_TD, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_two_micro_batches_and_the_halves_of_a_layer_read_nothing_back(
    device_client: DeviceClient,
) -> None:
    experts = RemoteExperts(device_client, layer=LAYERS[0], num_experts=E, top_k=K)
    given = [batch(T, seed, low=-1) for seed in range(2)]

    def both() -> Tensor:
        tickets = []
        for i, each in enumerate(given):
            with device_client.micro_batch(i):
                tickets.append(experts.dispatch(*each))
        return torch.stack([experts.combine(ticket, add=ticket.x_TD) for ticket in tickets])

    out = run_guarded(CapturedStep(device_client, both))
    expected = torch.stack([oracle(LAYERS[0], *each) + each[0] for each in given])
    error = (out.double() - expected).abs().max()
    assert error <= TOLERANCE[device_client.config.wire_dtype] * expected.abs().max()


def test_a_step_that_reads_a_number_is_found(device_client: DeviceClient) -> None:
    experts = RemoteExperts(device_client, layer=LAYERS[0], num_experts=E, top_k=K)
    given = batch(T)

    def step() -> Tensor:
        out_TD = experts(*given)
        return out_TD if out_TD.abs().max() < 1e6 else out_TD / 2

    captured = CapturedStep(device_client, step)
    with pytest.raises(ConfigError, match=r"bool\(tensor\) waits for the device"):
        run_guarded(captured)
