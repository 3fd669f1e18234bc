"""What the processes of a failover run do: serve experts, or ask for them and check the answers."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.marks import END, IDLE, RUN, Marks
from benchmarks.servers import LAYER, SEED, Sizes, routing
from torch_eaas.client import Client
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.errors import EaasError
from torch_eaas.experts import ExpertPool, GroupTable
from torch_eaas.monitor.announcement import ModelInfo
from torch_eaas.placement import share
from torch_eaas.server import ExpertServer
from torch_eaas.testing import DelayedExperts, random_experts

NUM_BATCHES = 16
TOLERANCE = 1e-5
LOOK_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of servers and what they are asked."""

    name: str
    """How rows call it."""

    sizes: Sizes
    """The layer."""

    num_tokens: int
    """T of a forward."""

    delay: timedelta
    """How long a batch takes beside its arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRole:
    """Which server a process is."""

    kind: Kind
    """What it serves."""

    index: int
    """Its number."""

    count: int
    """How many servers there are; each expert has two of them."""

    monitor: str | None = None
    """The monitor to join."""

    address: str = ""
    """Where it listens; empty: anywhere."""

    ballast_bytes: int = 0
    """Memory that it touches, as weights would be."""


class _MarkedExperts(DelayedExperts):
    """Experts that leave a mark while they run."""

    def __init__(self, role: ServerRole, pool: ExpertPool, marks: Marks) -> None:
        super().__init__(pool.hidden_size, pool.holdings, role.kind.delay, pool=pool)
        self._marks, self._index = marks, role.index

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
        self._marks.in_hand[self._index] = 1
        out = super().run(table, x_TD, groups_TK, weights_TK, per_expert=per_expert)
        self._marks.in_hand[self._index] = 0
        return out


def serve(marks: Marks, role: ServerRole) -> None:
    """Be a server until killed."""
    sizes = role.kind.sizes
    ballast = np.ones(role.ballast_bytes, dtype=np.uint8)
    weights = random_experts(sizes.hidden, sizes.intermediate, [LAYER], sizes.num_experts, SEED)
    held = share([LAYER], sizes.num_experts, role.index, role.count, copies=min(2, role.count))
    pool = ExpertPool(sizes.hidden, sizes.intermediate)
    pool.update({(LAYER, expert): weights[LAYER, expert] for expert in held[LAYER]})
    marks.in_hand[role.index] = 0
    server = ExpertServer(
        _MarkedExperts(role, pool, marks),
        ServerConfig(name=f"server-{role.index}", address=role.address, fingerprint="failover"),
        monitor=role.monitor,
        model=ModelInfo(fingerprint="failover", layers=(LAYER,), num_experts=sizes.num_experts),
    )

    def count_pairs() -> None:
        while True:
            marks.pairs[role.index] = server.num_clients
            time.sleep(LOOK_S)

    threading.Thread(target=count_pairs, daemon=True).start()
    with server:
        server.serve()
    del ballast


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRole:
    """Which client a process is."""

    kind: Kind
    """What it asks for."""

    index: int
    """Its number."""

    monitor: str
    """The monitor that tells it of servers."""


def ask(marks: Marks, role: ClientRole) -> None:
    """Be a client that makes one forward after the other while it is told to run."""
    kind, index = role.kind, role.index
    config = ClientConfig(
        hidden_size=kind.sizes.hidden,
        top_k=kind.sizes.top_k,
        name=f"client-{index}",
        max_tokens=kind.num_tokens,
        request_timeout=timedelta(seconds=1),
    )
    batches = _batches(kind)
    with Client(config, monitor=role.monitor) as client:
        client.wait_ready([LAYER], kind.sizes.num_experts)
        number = 0
        while marks.command[index] != END:
            if marks.command[index] == IDLE:
                marks.state[index] = IDLE
                time.sleep(LOOK_S)
                continue
            marks.state[index] = RUN
            _forward(marks, role, client, batches[number % NUM_BATCHES])
            number += 1
    marks.state[index] = END


def _forward(marks: Marks, role: ClientRole, client: Client, batch: tuple[Tensor, ...]) -> None:
    index, experts = role.index, role.kind.sizes.num_experts
    x_TD, ids_TK, weights_TK, wanted_TD = batch
    started = time.monotonic()
    try:
        ticket = client.dispatch(LAYER, x_TD, ids_TK, weights_TK, num_experts=experts)
        out_TD = client.combine(ticket)
    except EaasError as error:
        marks.failed[index] += 1
        print(f"client-{index}: {error}", file=sys.stderr)
        return
    marks.record(index, started, time.monotonic() - started)
    if not torch.allclose(out_TD.double(), wanted_TD, rtol=TOLERANCE, atol=TOLERANCE):
        marks.wrong[index] += 1
    marks.busy_s[index] += time.monotonic() - started


def _batches(kind: Kind) -> list[tuple[Tensor, ...]]:
    """Return tokens, ids, weights and the local answer of some forwards."""
    sizes = kind.sizes
    held = random_experts(sizes.hidden, sizes.intermediate, [LAYER], sizes.num_experts, SEED)
    batches: list[tuple[Tensor, ...]] = []
    for seed in range(NUM_BATCHES):
        generator = torch.Generator().manual_seed(seed)
        x_TD = torch.randn(kind.num_tokens, sizes.hidden, generator=generator)
        ids_TK, weights_TK = routing(sizes, kind.num_tokens, seed)
        sum_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
        for expert in range(sizes.num_experts):
            w = held[LAYER, expert]
            gate_ID, up_ID, down_DI = (m.double() for m in (w.gate_ID, w.up_ID, w.down_DI))
            scale_T = torch.where(ids_TK == expert, weights_TK, 0.0).sum(-1).double()
            inner = torch.nn.functional.silu(x_TD.double() @ gate_ID.T) * (x_TD.double() @ up_ID.T)
            sum_TD += scale_T[:, None] * (inner @ down_DI.T)
        batches.append((x_TD, ids_TK, weights_TK, sum_TD))
    return batches
