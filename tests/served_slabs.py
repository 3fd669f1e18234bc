"""What the device server's tests share: small slabs, servers on a CPU, experts that are exact.

Shape legend: T tokens, K experts per token, D hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tests.monitor.planned import wait_until
from tests.served import LAYERS, WEIGHTS, D, E, I, K
from torch_eaas.client import Client
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.device.server import DeviceServer
from torch_eaas.experts import ExpertWeights
from torch_eaas.protocol.layout import PairSpec

T = 8
SPEC = PairSpec(hidden_size=D, top_k=K, slots=2, max_tokens=T)
R = 4

Key = tuple[int, int]


def slab(
    held: Sequence[Key] | None = None,
    *,
    slots: int = len(LAYERS) * E,
    storage: Any = "fp32",
    weights: Mapping[Key, ExpertWeights] = WEIGHTS,
) -> ExpertSlab:
    """Return a slab of all experts, or of those named."""
    made = ExpertSlab(
        D, I, slots=slots, max_layers=max(LAYERS) + 1, max_experts=E, storage=storage, device="cpu"
    )
    made.update({key: weights[key] for key in (held if held is not None else weights)})
    return made


def server_of(
    experts: ExpertSlab, spec: PairSpec = SPEC, *, transport: Transport | None = None, **more: Any
) -> DeviceServer:
    """Return a server for few small requests; it serves when it is stepped."""
    names = {"name", "max_pairs", "max_rows", "room", "fingerprint", "drain_timeout"}
    names = (names | {"address", "access"}) & set(more)
    options: dict[str, Any] = {"name": "device", "max_pairs": 3}
    options |= {name: more.pop(name) for name in names}
    return DeviceServer(
        experts, spec, ServerConfig(**options), max_requests=R, transport=transport, **more
    )


@contextmanager
def client_of(
    *servers: Any, transport: Transport | None = None, **options: Any
) -> Iterator[Client]:
    """Give a client that fits ``SPEC`` and has open pairs."""
    config = ClientConfig(
        **{
            **{"hidden_size": D, "top_k": K, "max_tokens": T, "max_micro_batches": 1},
            **options,
        }
    )
    transport = transport or SharedMemoryTransport()
    with Client(config, servers=[s.address for s in servers], transport=transport) as client:
        wait_until(lambda: len(client._connections.live) == len(servers))
        yield client


def whole_weights(seed: int = 0) -> dict[Key, ExpertWeights]:
    """Return experts whose outputs are whole numbers for tokens of ``whole_tokens``.

    Each gate is 64 or more, where ``silu`` is the identity in fp32, and every product and sum is a
    whole number that fp32 has: so every order of adding gives the same bits.
    """
    made = torch.Generator().manual_seed(seed)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=made).float()

    experts = {}
    for layer in LAYERS:
        for expert in range(E):
            gate_ID = torch.zeros(I, D)
            gate_ID[:, 0] = 64.0 + expert
            experts[layer, expert] = ExpertWeights(gate_ID, whole(I, D), whole(D, I))
    return experts


def whole_tokens(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Return tokens of small whole numbers that open every gate."""
    made = torch.Generator().manual_seed(seed)
    x_TD = torch.randint(-3, 4, (num_tokens, D), generator=made).float()
    x_TD[:, 0] = 1.0
    return x_TD
