"""Expert servers as processes of their own, for a benchmark's client."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch

from torch_eaas.client import Client
from torch_eaas.config import ClientConfig, ServerConfig, Storage
from torch_eaas.experts import ExpertPool
from torch_eaas.placement import share
from torch_eaas.server import ExpertServer
from torch_eaas.server_batch import Experts
from torch_eaas.testing import DelayedExperts, random_experts

LAYER = 0
SEED = 1

PATIENT: dict[str, Any] = {
    "request_timeout": timedelta(seconds=60),
    "hedge_after": timedelta(seconds=60),
}
"""Options of a client that measures: nobody fails, and a slow machine is no failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A MoE layer's sizes."""

    hidden: int = 1024
    """D."""

    intermediate: int = 512
    """I."""

    num_experts: int = 64
    """E."""

    top_k: int = 8
    """K."""

    def client(self, addresses: list[str], **options: Any) -> Client:
        """Return a client of these servers, ready to ask for every expert."""
        config = ClientConfig(hidden_size=self.hidden, top_k=self.top_k, **PATIENT, **options)
        client = Client(config, servers=addresses)
        client.wait_ready([LAYER], self.num_experts)
        return client


QUICK = Sizes(hidden=64, intermediate=32, num_experts=16)
"""Small enough to show in a moment that a benchmark runs."""


def routing(sizes: Sizes, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random expert ids and weights, ``(T, K)``; a token's ids differ."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, sizes.num_experts, generator=generator)
    weights_TK, ids_TK = scores.topk(sizes.top_k, dim=-1)
    return ids_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


def serve_pool(pipe: Pipe, sizes: Sizes, index: int, count: int, storage: Storage) -> None:
    """Serve a share of the layer's experts."""
    pool = ExpertPool(sizes.hidden, sizes.intermediate, storage=storage)
    weights = random_experts(sizes.hidden, sizes.intermediate, [LAYER], sizes.num_experts, SEED)
    held = share([LAYER], sizes.num_experts, index, count)[LAYER]
    pool.update({(LAYER, expert): weights[LAYER, expert] for expert in held})
    del weights
    serve_experts(pipe, pool, index)


def serve_delayed(pipe: Pipe, sizes: Sizes, index: int, count: int, delay: timedelta) -> None:
    """Serve a share of the layer's experts, which take ``delay`` and no core."""
    held = share([LAYER], sizes.num_experts, index, count)
    serve_experts(pipe, DelayedExperts(sizes.hidden, held, delay), index)


def serve_experts(pipe: Pipe, experts: Experts, index: int) -> None:
    """Send the address, then serve in this thread until the pipe ends."""
    torch.set_num_threads(1)
    with ExpertServer(experts, ServerConfig(name=f"server-{index}")) as server:
        threading.Thread(target=_watch, args=(pipe, server), daemon=True).start()
        pipe.send(server.address)
        server.serve()


def _watch(pipe: Pipe, server: ExpertServer) -> None:
    try:
        pipe.recv()
    except (EOFError, OSError):
        server.close()
