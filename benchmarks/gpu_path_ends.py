"""A client and servers of the device path for benchmarks: on one GPU, or on a CPU by the twins.

Shape legend: T tokens, K experts per token, E experts of a layer, D hidden, I intermediate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from typing_extensions import override

from torch_eaas.comm.cuda_ipc import CudaIpcTransport
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig, ServerConfig, Storage
from torch_eaas.device.client import DeviceClient
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.device.server import DeviceServer
from torch_eaas.errors import PeerTimeout
from torch_eaas.experts import ExpertWeights
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.testing import random_experts

Weights = Mapping[tuple[int, int], ExpertWeights]

PAIRS_S = 60.0
"""How long a client waits for its servers."""

TOLERANCE = {"fp32": 1e-4, "bf16": 0.02, "fp8": 0.1}
"""Largest error beside the largest number, by how weights are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One model's layers, which all have the same experts."""

    hidden: int = 1024
    intermediate: int = 256
    num_experts: int = 16
    top_k: int = 4
    layers: int = 3
    max_tokens: int = 256
    storage: Storage = "bf16"
    dtype: torch.dtype = torch.bfloat16
    """Of the hidden states, on the wire too."""

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Every (layer, expert)."""
        return [(layer, e) for layer in range(self.layers) for e in range(self.num_experts)]

    def weights(self, seed: int = 0) -> dict[tuple[int, int], ExpertWeights]:
        """Return the experts; every layer has the same ones."""
        one = random_experts(self.hidden, self.intermediate, [0], self.num_experts, seed)
        return {(layer, e): one[0, e] for layer, e in self.pairs}

    def batch(
        self, num_tokens: int, seed: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states, different experts of each token, and router weights."""
        made = torch.Generator().manual_seed(seed)
        x_TD = torch.randn(num_tokens, self.hidden, generator=made).to(self.dtype)
        scores_TE = torch.rand(num_tokens, self.num_experts, generator=made)
        weights_TK, ids_TK = scores_TE.topk(self.top_k)
        return x_TD.to(device), ids_TK.int().to(device), weights_TK.to(device)

    def config(self, **options: Any) -> ClientConfig:
        """Return a client's options."""
        wire = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        given = {"wire_dtype": wire, "max_tokens": self.max_tokens, "max_micro_batches": 1}
        return ClientConfig(hidden_size=self.hidden, top_k=self.top_k, **{**given, **options})


QUICK = Sizes(hidden=32, intermediate=16, num_experts=4, top_k=2, max_tokens=16)
"""For the twins on a CPU."""


class IdleSlab(ExpertSlab):
    """Experts that take no time: whatever lies in memory is their output."""

    @override
    def run(
        self, x_MD: Tensor, rows_R: Tensor, counts_S: Tensor, num_tokens_S: Tensor, **_: Any
    ) -> Tensor:
        return x_MD.new_empty((len(rows_R), x_MD.shape[1]), dtype=torch.float32)


def transport_for(device: torch.device) -> Transport:
    """Return what makes windows that a device can use, in this process and beyond it."""
    if device.type == "cuda":
        return CudaIpcTransport(device.index or 0)
    return SharedMemoryTransport()


def new_server(
    sizes: Sizes,
    weights: Weights,
    config: ClientConfig,
    *,
    name: str,
    device: torch.device,
    transport: Transport,
    address: str = "",
    slab: type[ExpertSlab] = ExpertSlab,
) -> DeviceServer:
    """Return a server of all experts that fits a client's options; it is not serving yet.

    Args:
        sizes: The model.
        weights: Its experts.
        config: The client's options.
        name: The server's name.
        device: Where it runs.
        transport: How it is reached.
        address: Its control endpoint, if another process must know it beforehand.
        slab: What makes its experts' memory.
    """
    experts = slab(
        sizes.hidden,
        sizes.intermediate,
        slots=len(weights) + 1,
        max_layers=sizes.layers,
        max_experts=sizes.num_experts,
        storage=sizes.storage,
        device=device,
    )
    experts.update(weights)
    options = ServerConfig(name=name, address=address, max_pairs=4, max_rows=2048)
    return DeviceServer(experts, PairSpec.of(config), options, max_requests=4, transport=transport)


def new_client(
    sizes: Sizes,
    config: ClientConfig,
    addresses: Sequence[str],
    *,
    device: torch.device,
    transport: Transport,
) -> DeviceClient:
    """Return a client that has found a holder of every expert."""
    client = DeviceClient(
        config, device=device, servers=addresses, transport=transport, max_servers=4, max_replicas=2
    )
    client.wait_ready(range(sizes.layers), sizes.num_experts, timedelta(seconds=PAIRS_S))
    return client


def await_pairs(client: DeviceClient, count: int) -> None:
    """Wait until so many pairs are open: a client is ready as soon as each expert has one holder.

    Raises:
        PeerTimeout: They were not within a minute.
    """
    deadline = time.monotonic() + PAIRS_S
    while len(client._connections.live) < count:
        if time.monotonic() > deadline:
            raise PeerTimeout(
                f"the client has {len(client._connections.live)} pairs within {PAIRS_S:g} s, "
                f"not {count}"
            )
        time.sleep(0.01)


def local_layer(
    sizes: Sizes, weights: Weights, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return what the layer's experts give, in float64 from weights as they are stored."""
    dtype = torch.float32 if sizes.storage == "fp32" else torch.bfloat16
    x_TD = x_TD.double()
    out_TD = torch.zeros_like(x_TD)
    for e in range(sizes.num_experts):
        w = weights[layer, e]
        gate_ID, up_ID, down_DI = (
            matrix.to(x_TD.device, dtype).double() for matrix in (w.gate_ID, w.up_ID, w.down_DI)
        )
        share_T1 = torch.where(ids_TK == e, weights_TK, 0).double().sum(1, keepdim=True)
        out_TD += share_T1 * (F.silu(x_TD @ gate_ID.T) * (x_TD @ up_ID.T) @ down_DI.T)
    return out_TD
