"""What the client's and the server's tests share: small experts, an oracle, servers by threads.

Shape legend: T tokens, K experts per token, D hidden, I intermediate, E experts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.monitor.planned import wait_until
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.experts import ExpertPool, ExpertWeights, GroupTable
from torch_eaas.placement import share
from torch_eaas.server import ExpertServer

D, I, E, K = 24, 20, 8, 2
LAYERS = (1, 3)


def weights(seed: int = 0) -> dict[tuple[int, int], ExpertWeights]:
    """Return the same random experts at each call."""
    made = torch.Generator().manual_seed(seed)
    return {
        (layer, expert): ExpertWeights(
            torch.randn(I, D, generator=made) * 0.3,
            torch.randn(I, D, generator=made) * 0.3,
            torch.randn(D, I, generator=made) * 0.3,
        )
        for layer in LAYERS
        for expert in range(E)
    }


WEIGHTS = weights()


def batch(num_tokens: int, seed: int = 0, *, low: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, ids from ``low`` to E - 1, and weights."""
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_tokens, D, generator=made),
        torch.randint(low, E, (num_tokens, K), generator=made),
        torch.rand(num_tokens, K, generator=made),
    )


def oracle(layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the layer's routed sum, token by token and expert by expert, in float64."""
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token in range(len(x_TD)):
        for k in range(ids_TK.shape[1]):
            expert = int(ids_TK[token, k])
            if 0 <= expert < E:
                w = WEIGHTS[layer, expert]
                x = x_TD[token].double()
                gate = w.gate_ID.double() @ x
                hidden = gate / (1 + torch.exp(-gate)) * (w.up_ID.double() @ x)
                out_TD[token] += weights_TK[token, k].double() * (w.down_DI.double() @ hidden)
    return out_TD


def pool(held: Sequence[tuple[int, int]] | None = None) -> ExpertPool:
    """Return a pool of all experts, or of those named."""
    made = ExpertPool(D, I)
    made.update({key: WEIGHTS[key] for key in (held if held is not None else WEIGHTS)})
    return made


class PlannedExperts:
    """A pool that waits where a test plans it: ``hold`` stops every run until ``go``."""

    def __init__(self, inner: ExpertPool) -> None:
        self.inner = inner
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.fail_with: Exception | None = None
        self.batches: list[int] = []
        self.hidden_size = inner.hidden_size

    @property
    def holdings(self) -> Any:
        return self.inner.holdings

    @property
    def table(self) -> GroupTable:
        return self.inner.table

    def hold(self) -> None:
        self.entered.clear()
        self.go.clear()

    def run(self, table: GroupTable, x_TD: Tensor, *rest: Tensor, per_expert: bool) -> Tensor:
        self.batches.append(len(x_TD))
        self.entered.set()
        assert self.go.wait(20)
        if self.fail_with is not None and not torch.isfinite(x_TD).all():
            raise self.fail_with
        return self.inner.run(table, x_TD, *rest, per_expert=per_expert)


class Served:
    """Servers in threads; experts go round them, each with ``copies`` holders."""

    def __init__(self, transport: Transport, num_servers: int, copies: int) -> None:
        self.transport = transport
        self.experts: list[PlannedExperts] = []
        self.servers: list[ExpertServer] = []
        for i in range(num_servers):
            held = share(LAYERS, E, i, num_servers, copies=copies)
            keys = [(layer, expert) for layer, ids in held.items() for expert in ids]
            self.experts.append(PlannedExperts(pool(keys)))
            config = ServerConfig(name=f"s{i}")
            server = ExpertServer(self.experts[-1], config, transport=transport)
            self.servers.append(server.serve_in_background())
        self.clients: list[Client] = []

    def client(self, *, clock: Callable[[], float] = time.monotonic, **options: Any) -> Client:
        """Return a client of all servers that has open pairs to them."""
        config = ClientConfig(hidden_size=D, top_k=K, **{"max_tokens": 16, **options})
        addresses = [server.address for server in self.servers]
        client = Client(config, servers=addresses, transport=self.transport, clock=clock)
        self.clients.append(client)
        client.wait_ready(LAYERS, E)
        # it is ready as soon as each expert has one holder
        wait_until(lambda: not client._connections.closed)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for experts in self.experts:
            experts.go.set()
        for server in self.servers:
            server.close()


@contextmanager
def served(
    num_servers: int = 3, copies: int = 1, transport: Transport | None = None
) -> Iterator[Served]:
    """Run servers for the time of a test."""
    cluster = Served(transport or LoopbackTransport(), num_servers, copies)
    try:
        yield cluster
    finally:
        cluster.close()


def call(client: Client, layer: int, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Dispatch and combine."""
    return client.combine(client.dispatch(layer, x, ids, w, num_experts=E))
