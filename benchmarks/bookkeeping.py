"""What one dispatch and combine cost the client, without waiting and without experts.

Client and servers share one thread: the servers answer between dispatch and combine, and only
dispatch and combine are timed.
"""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from datetime import timedelta

import torch

from benchmarks.harness import Options, cores, figures, pinned
from benchmarks.servers import LAYER, PATIENT, Sizes, routing
from torch_eaas.cli.report import Report
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.placement import share
from torch_eaas.server import ExpertServer
from torch_eaas.testing import DelayedExperts

R1 = Sizes(hidden=7168, num_experts=256, top_k=8)
NUM_SERVERS = (1, 3, 8, 32)
NUM_TOKENS = (1, 4, 8)
CALLS = 100
"""Calls of a round."""

CHECKS = ((3, "<= 210"), (32, "<= 790"))
"""At most 150 us + 20 us a server."""


def measure(report: Report, options: Options) -> None:
    """Add a row for each number of servers and tokens, and the checks."""
    with pinned(cores()[0]):
        for num_servers in NUM_SERVERS:
            for num_tokens, rounds_s in _measure(num_servers, options).items():
                report.add_row(
                    "bookkeeping", f"N{num_servers}", f"T{num_tokens}", **figures(rounds_s)
                )
    for num_servers, target in CHECKS:
        each = [f"rows['bookkeeping','N{num_servers}','T{t}'].p50_us" for t in NUM_TOKENS]
        report.add_check(f"bookkeeping_{num_servers}_us", f"max({', '.join(each)})", target)


def _measure(num_servers: int, options: Options) -> dict[int, list[list[float]]]:
    transport = LoopbackTransport()
    times: dict[int, list[list[float]]] = {num_tokens: [] for num_tokens in NUM_TOKENS}
    with ExitStack() as stack:
        servers = []
        for index in range(num_servers):
            held = share([LAYER], R1.num_experts, index, num_servers)
            experts = DelayedExperts(R1.hidden, held, timedelta(0))
            config = ServerConfig(name=f"server-{index:02}")
            servers.append(stack.enter_context(ExpertServer(experts, config, transport=transport)))
        client = Client(
            ClientConfig(hidden_size=R1.hidden, top_k=R1.top_k, wire_dtype="bf16", **PATIENT),
            servers=[server.address for server in servers],
            transport=transport,
            background=False,
        )
        stack.enter_context(client)
        client.wait_ready([LAYER], R1.num_experts)
        for number in range(-1, options.rounds):
            for num_tokens in NUM_TOKENS:
                round_s = _round(client, servers, num_tokens, options.count(CALLS))
                # round -1 warms up
                if number >= 0:
                    times[num_tokens].append(round_s)
    return times


def _round(client: Client, servers: list[ExpertServer], num_tokens: int, calls: int) -> list[float]:
    x_TD = torch.randn(num_tokens, R1.hidden).to(torch.bfloat16)
    times = []
    gc.collect()
    for call in range(calls):
        ids_TK, weights_TK = routing(R1, num_tokens, call)
        start = time.perf_counter()
        ticket = client.dispatch(LAYER, x_TD, ids_TK, weights_TK, num_experts=R1.num_experts)
        dispatched = time.perf_counter()
        for server in servers:
            server.step()
        answered = time.perf_counter()
        client.combine(ticket)
        times.append(dispatched - start + time.perf_counter() - answered)
    return times
