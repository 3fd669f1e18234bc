"""What the tests of compiled layers share.

Nearly all of them run under ``aot_eager``: what Inductor adds there is minutes of C++.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.served import D, E, K, oracle
from torch_eaas.client import Client
from torch_eaas.remote_moe import RemoteExperts, RemoteMoE
from torch_eaas.routers import SoftmaxTopKRouter


def remote(client: Client, layer: int = 1) -> RemoteExperts:
    """Return a layer's experts as a client reaches them."""
    return RemoteExperts(client, layer=layer, num_experts=E, top_k=K)


def layer_of(client: Client, layer: int = 1) -> RemoteMoE:
    """Return a layer with a router and a shared expert of its own."""
    torch.manual_seed(layer)
    shared = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D))
    return RemoteMoE(SoftmaxTopKRouter(D, E, K), remote(client, layer), shared)


def whole(module: Callable[..., Any], **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    """Compile without a graph break; return the result and what counts its graphs."""
    graphs = CompileCounterWithBackend("aot_eager")
    return torch.compile(module, fullgraph=True, backend=graphs, **options), graphs


def assert_right(layer: int, inputs: tuple[Tensor, ...], found: Tensor) -> None:
    """Compare with the layer's routed sum."""
    torch.testing.assert_close(found.double(), oracle(layer, *inputs), rtol=1e-5, atol=1e-5)


def assert_layer(moe: RemoteMoE, layer: int, x: Tensor, found: Tensor) -> None:
    """Compare with the routed sum plus the shared expert."""
    assert moe.shared is not None
    expected = oracle(layer, x, *moe.router(x)) + moe.shared(x).double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
