"""What the tests of double-batch overlap share: a model of two layers, its oracle, a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from tests.served import LAYERS, WEIGHTS, D, E, K, oracle
from torch_eaas.client import Client
from torch_eaas.remote_moe import RemoteExperts, RemoteMoE
from torch_eaas.routers import GroupLimitedRouter
from torch_eaas.testing import LocalCluster

NEVER = timedelta(seconds=30)
SCALE = 2.5


class Router(GroupLimitedRouter):
    """A router whose row's bits do not depend on how many other rows there are."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [super(Router, self).forward(row_D[None]) for row_D in x_TD]
        return torch.cat([ids for ids, _ in pairs]), torch.cat([w for _, w in pairs])


def router() -> Router:
    torch.manual_seed(5)
    return Router(D, E, K, n_group=4, topk_group=2, routed_scaling_factor=SCALE)


class Model(nn.Module):
    """Two layers of remote experts, and in between what treats each row by itself."""

    def __init__(self, client: Client, router: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            RemoteMoE(
                router,
                RemoteExperts(client, layer=layer, num_experts=E, top_k=K),
                shared=nn.Tanh(),
            )
            for layer in LAYERS
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        for layer in self.layers:
            x_TD = torch.tanh(x_TD + layer(x_TD))
        return x_TD


@contextmanager
def cluster_and_client(**options: Any) -> Iterator[tuple[LocalCluster, Client]]:
    with LocalCluster(WEIGHTS, servers=2, copies=2) as cluster, torch.no_grad():
        yield cluster, cluster.client(top_k=K, **{"max_micro_batches": 5, **options})


def expected(x_TD: Tensor, router: nn.Module) -> Tensor:
    """Return what the model computes, by the oracle; its weights have the factor once."""
    for layer in LAYERS:
        routed = oracle(layer, x_TD, *router(x_TD))
        x_TD = torch.tanh(x_TD.double() + routed + torch.tanh(x_TD.double())).float()
    return x_TD
