"""What the tests of clients on a device share: exact experts, servers in threads, a model's step.

Shape legend: T tokens, K experts per token, D hidden, E experts, L layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.monitor.planned import wait_until
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.device.client import DeviceClient
from torch_eaas.experts import GroupTable
from torch_eaas.placement import Holdings, holdings_from
from torch_eaas.remote_moe import RemoteExperts, RemoteMoE
from torch_eaas.server import ExpertServer
from torch_eaas.server_batch import Experts

T, D, K, E = 3, 8, 2, 4
PATIENT = timedelta(seconds=5)
"""A wait that only a dead or held server outlasts, however busy the machine is."""

BRIEF = timedelta(milliseconds=500)
"""A wait that a test means to fail."""


def scale_of(expert: int) -> float:
    """Return what an expert multiplies by: sums of these are exact however they are grouped."""
    return 2.0 ** -(expert + 1)


class HalvingExperts(Experts):
    """Expert e of any layer multiplies by ``2 ** -(e + 1)``; tests hold it up, or make it raise."""

    def __init__(self, keys: Sequence[tuple[int, int]]) -> None:
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.on_batch: Callable[[], None] = lambda: None
        self.num_batches = 0
        self.hold(keys)

    def hold(self, keys: Sequence[tuple[int, int]]) -> None:
        """Hold these (layer, expert) pairs from now on."""
        self._holdings = holdings_from(keys)
        scales: Any = {key: scale_of(key[1]) for key in keys}
        self._table = GroupTable(scales)

    def stop(self) -> None:
        """Answer nothing until ``go`` is set."""
        self.entered.clear()
        self.go.clear()

    @property
    @override
    def hidden_size(self) -> int:
        return D

    @property
    @override
    def holdings(self) -> Holdings:
        return self._holdings

    @property
    @override
    def table(self) -> GroupTable:
        return self._table

    @override
    def run(
        self,
        table: GroupTable,
        x_TD: Tensor,
        groups_TK: Tensor,
        weights_TK: Tensor,
        *,
        per_expert: bool,
    ) -> Tensor:
        self.num_batches += 1
        self.entered.set()
        self.on_batch()
        assert self.go.wait(20)
        # one scale more, 0: it serves group -1
        scales = torch.tensor([*table.experts, 0.0])
        rows_TKD = (scales[groups_TK] * weights_TK).unsqueeze(-1) * x_TD.float().unsqueeze(1)
        return rows_TKD if per_expert else rows_TKD.sum(1)


def moe_sum(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return what the experts make of a batch, in fp32; ids that are none count as none."""
    scales = torch.tensor([*map(scale_of, range(E)), 0.0])
    known_TK = ids_TK.long().where((ids_TK >= 0) & (ids_TK < E), E)
    return ((scales[known_TK] * weights_TK).unsqueeze(-1) * x_TD.float().unsqueeze(1)).sum(1)


def inputs(num_tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, ids and weights; sixty layers of them stay exact sums of powers of two."""
    x_TD = torch.arange(1.0, num_tokens * D + 1).view(num_tokens, D)
    ids_TK = (torch.arange(num_tokens)[:, None] + 2 * torch.arange(K)) % E
    return x_TD, ids_TK, torch.full((num_tokens, K), 2.0**-6)


def every_expert(layers: int) -> list[tuple[int, int]]:
    return [(layer, expert) for layer in range(layers) for expert in range(E)]


class World:
    """Host-driven servers in threads, and device clients of theirs."""

    def __init__(
        self, held: Sequence[Sequence[tuple[int, int]]], transport: Transport | None = None
    ) -> None:
        self.transport = transport or SharedMemoryTransport()
        self.experts = [HalvingExperts(keys) for keys in held]
        self.servers = [self.serve(i, experts) for i, experts in enumerate(self.experts)]
        self.clients: list[DeviceClient] = []

    def serve(self, index: int, experts: HalvingExperts, address: str = "") -> ExpertServer:
        config = ServerConfig(name=f"s{index}", address=address)
        server = ExpertServer(experts, config, transport=self.transport)
        return server.serve_in_background()

    def add(self, keys: Sequence[tuple[int, int]], address: str = "") -> ExpertServer:
        """Start one server more."""
        self.experts.append(HalvingExperts(keys))
        self.servers.append(self.serve(len(self.servers), self.experts[-1], address))
        return self.servers[-1]

    def client(
        self, *, servers: Sequence[str] | None = None, max_servers: int = 4, **options: Any
    ) -> DeviceClient:
        """Return a client with a pair to every server."""
        replicas = options.pop("max_replicas", 2)
        config = device_config(**options)
        if servers is None:
            servers = [server.address for server in self.servers]
        client = DeviceClient(
            config,
            servers=servers,
            transport=self.transport,
            max_servers=max_servers,
            max_replicas=replicas,
            instance=1 + len(self.clients),
        )
        self.clients.append(client)
        wait_until(lambda: len(client._connections.live) == len(self.servers))
        return client

    def close(self) -> None:
        for experts in self.experts:
            experts.go.set()
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.close()


def device_config(**options: Any) -> ClientConfig:
    """Return a client's options for these experts."""
    options = {"max_tokens": 4, "graph_wait": PATIENT, **options}
    return ClientConfig(hidden_size=D, top_k=K, **options)


@contextmanager
def world(*held: Sequence[tuple[int, int]], transport: Transport | None = None) -> Iterator[World]:
    """Run servers that hold what is named, one for each argument, for the time of a test."""
    made = World(held, transport)
    try:
        yield made
    finally:
        made.close()


def call(client: DeviceClient, *routed: Tensor, add: Tensor | None = None) -> Tensor:
    """Dispatch to layer 0 and combine."""
    return client.combine(client.dispatch(0, *routed, num_experts=E), add)


class Stub(nn.Module):
    """L layers that keep what they see, as attention keeps its KV, and add what experts make of it.

    Args:
        client: Reaches the servers.
        layers: The layers, as the servers number them.
    """

    def __init__(self, client: DeviceClient, layers: Sequence[int]) -> None:
        super().__init__()
        x_TD, self.ids_TK, self.weights_TK = inputs()
        self.x_TD = x_TD
        self.kept_LTD = torch.zeros(len(layers), *x_TD.shape)
        self.layers = nn.ModuleList(
            RemoteMoE(
                lambda _: (self.ids_TK, self.weights_TK),
                RemoteExperts(client, layer=layer, num_experts=E, top_k=K),
                nn.Identity(),
            )
            for layer in layers
        )

    def forward(self) -> Tensor:
        x_TD = self.x_TD
        for i, layer in enumerate(self.layers):
            self.kept_LTD[i] = x_TD
            x_TD = layer(x_TD)
        return x_TD

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return the output and what is kept, computed here."""
        x_TD, kept = self.x_TD, []
        for _ in self.layers:
            kept.append(x_TD)
            x_TD = x_TD + moe_sum(x_TD, self.ids_TK, self.weights_TK)
        return x_TD, torch.stack(kept)
