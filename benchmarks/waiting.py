"""How long a client waits beyond what the experts take: three servers and a client on two cores."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch

from benchmarks.harness import Options, cores, pinned
from benchmarks.servers import LAYER, QUICK, Sizes, routing, serve_delayed, serve_pool
from benchmarks.workers import Worker
from torch_eaas.cli.report import Report, percentile
from torch_eaas.client import Client

DELAY = timedelta(milliseconds=2)
NUM_SERVERS = 3
NUM_TOKENS = 8
DISPATCHES = 1500
WARM_UP = 20
FORMULA = "percentile(rows['wait','planned'].extra_us, 99)"


def measure(report: Report, options: Options) -> None:
    """Add a row for experts of a planned delay and one for real ones, and the check."""
    sizes = QUICK if options.quick else Sizes()
    delay_us = DELAY // timedelta(microseconds=1)
    with pinned(*cores()):
        waits, _ = _waits(sizes, serve_delayed, DELAY, options.count(DISPATCHES))
        extra = [round(wait - delay_us, 1) for wait in waits]
        report.add_row("wait", "planned", **_shown(extra), delay_us=delay_us, extra_us=extra)
        report.add_check("wait_extra_p99_us", FORMULA, "<= 1000")
        if not options.quick:
            waits, ran = _waits(sizes, serve_pool, "fp32", DISPATCHES // 3)
            extra = [round(wait - us, 1) for wait, us in zip(waits, ran, strict=True)]
            report.add_row("wait", "real", **_shown(extra), extra_us=extra)


def _shown(extra: list[float]) -> dict[str, float | int]:
    return {
        "extra_p50_us": percentile(extra, 50),
        "extra_p99_us": percentile(extra, 99),
        "extra_max_us": max(extra),
        "calls": len(extra),
    }


def _waits(sizes: Sizes, target: Any, planned: Any, calls: int) -> tuple[list[float], list[float]]:
    """Return each call's wait and the slowest server's time for its experts, in us."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(target, (sizes, index, NUM_SERVERS, planned), cores=cores()))
            for index in range(NUM_SERVERS)
        ]
        client = stack.enter_context(sizes.client([worker.receive() for worker in workers]))
        for call in range(WARM_UP):
            _call(client, sizes, call)
        pairs = [_call(client, sizes, call) for call in range(calls)]
    return [wait for wait, _ in pairs], [experts for _, experts in pairs]


def _call(client: Client, sizes: Sizes, call: int) -> tuple[float, float]:
    x_TD = torch.randn(NUM_TOKENS, sizes.hidden)
    ids_TK, weights_TK = routing(sizes, NUM_TOKENS, call)
    ran = client.counters().get("experts_us", 0)
    ticket = client.dispatch(LAYER, x_TD, ids_TK, weights_TK, num_experts=sizes.num_experts)
    # from here on the client does nothing but wait, and add up
    start = time.perf_counter()
    client.combine(ticket)
    wait_us = (time.perf_counter() - start) * 1e6
    return wait_us, client.counters()["experts_us"] - ran
