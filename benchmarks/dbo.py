"""Double-batch overlap against the same micro-batches one after the other.

*Planned*: a layer costs a micro-batch ``a`` of the client's core and ``d`` at its server, which
sleeps meanwhile. The delay is pure latency: each micro-batch has a server of its own, so that none
queues. Then N micro-batches in flight need ``max(a, (a + d) / N)`` a layer and micro-batch at best;
``a`` is what a plain run takes beside its waits, so it includes the client's bookkeeping. *Cut in
two* is one batch whose halves cost half of ``a`` each, and all of ``d``. *Carried*: the checkpoint
that the repository carries, with real servers.

The client has one core, the servers the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from benchmarks import dbo_carried
from benchmarks.harness import Options, cores, pinned
from benchmarks.servers import LAYER, SEED, Sizes, serve_delayed
from benchmarks.workers import Worker
from torch_eaas.cli.report import Report, median
from torch_eaas.client import Client
from torch_eaas.dbo import DoubleBatchOverlap
from torch_eaas.placement import share

SIZES = Sizes(hidden=1024, num_experts=16, top_k=2)
NUM_TOKENS = 8
NUM_LAYERS = 32
IN_FLIGHT = (2, 3, 4)
MS = 1e-3
COSTS_MS = ((2, 8), (2, 4), (2, 2), (4, 2), (8, 2))
"""``a`` and ``d``: a ratio of 0.25 to 4, the smaller of both 2 ms."""


@dataclass(slots=True, kw_only=True)
class Times:
    """What the rounds of one pair of costs took, in seconds a layer and micro-batch."""

    plain: list[float] = field(default_factory=list)
    """One after the other, waits included."""

    computed: list[float] = field(default_factory=list)
    """The same without waits: ``a``."""

    overlap: dict[int, list[float]] = field(default_factory=dict)
    """By the number of micro-batches in flight."""


def run(options: Options) -> Report:
    """Measure all three parts."""
    torch.set_num_threads(1)
    report = Report(name="dbo")
    costs = COSTS_MS[2:3] if options.quick else COSTS_MS
    in_flight = IN_FLIGHT[:1] if options.quick else IN_FLIGHT
    # before pinning: it leaves one core to be seen
    client_core, server_core = cores()
    with pinned(client_core):
        for delay_ms in sorted({delay for _, delay in costs}):
            with _served(delay_ms, max(in_flight), server_core) as client:
                bench = _Bench(client, options, in_flight)
                for compute_ms, delay in costs:
                    if delay == delay_ms:
                        bench.measure(report, compute_ms, delay)
                if delay_ms == 2:
                    bench.measure_cut_in_two(report)
        if not options.quick:
            dbo_carried.measure(report, options, client_core, server_core)
    _check(report, costs, in_flight)
    return report


@contextmanager
def _served(delay_ms: int, count: int, core: int) -> Iterator[Client]:
    """Run a server for each micro-batch, which all take as long."""
    delay = timedelta(milliseconds=delay_ms)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(serve_delayed, (SIZES, index, count, delay), cores=[core]))
            for index in range(count)
        ]
        addresses = [worker.receive() for worker in workers]
        yield stack.enter_context(SIZES.client(addresses, max_micro_batches=count))


class _Bench:
    """Runs planned micro-batches, plain and overlapped."""

    def __init__(self, client: Client, options: Options, in_flight: tuple[int, ...]) -> None:
        self._client = client
        self._in_flight = in_flight
        self._rounds = options.rounds
        self._layers = 8 if options.quick else NUM_LAYERS
        self._x_TD = torch.randn(NUM_TOKENS, SIZES.hidden)
        self._weights_TK = torch.full((NUM_TOKENS, SIZES.top_k), 1 / SIZES.top_k)
        generator = torch.Generator().manual_seed(SEED)
        count = max(in_flight)
        self._ids = [
            torch.tensor(share([LAYER], SIZES.num_experts, index, count)[LAYER])[
                torch.rand(NUM_TOKENS, SIZES.num_experts // count, generator=generator)
                .topk(SIZES.top_k)
                .indices
            ]
            for index in range(count)
        ]

    def measure(self, report: Report, compute_ms: int, delay_ms: int) -> None:
        """Add a row for each number of micro-batches in flight."""
        before = self._client.counters()
        times = self._measure(compute_ms * MS)
        after = self._client.counters()
        num_calls = after["dispatches"] - before.get("dispatches", 0)
        a, d = median(times.computed), delay_ms * MS
        for count, overlap in times.overlap.items():
            report.add_row(
                f"a{compute_ms} d{delay_ms}",
                f"N{count}",
                **_figures(times, overlap),
                d_us=delay_ms * 1000,
                # by the servers' clocks: the planned delay, and how much longer its sleep lasts
                experts_us=round((after["experts_us"] - before.get("experts_us", 0)) / num_calls),
                ideal_us=_us(max(a, (a + d) / count)),
            )

    def measure_cut_in_two(self, report: Report) -> None:
        """Add a row for one batch, and for its halves."""
        times = self._no_times()
        for number in range(-1, self._rounds):
            into = times if number >= 0 else self._no_times()
            self._plain(into, 2 * MS, count=1)
            self._overlap(into, 1 * MS, 2)
        both = [2 * seconds for seconds in times.overlap[2]]
        report.add_row("cut in two", "N2", **_figures(times, both), d_us=2000)

    def _measure(self, compute_s: float) -> Times:
        times = self._no_times()
        # round -1 warms up
        for number in range(-1, self._rounds):
            into = times if number >= 0 else self._no_times()
            self._plain(into, compute_s, count=2)
            for count in self._in_flight:
                self._overlap(into, compute_s, count)
        return times

    def _no_times(self) -> Times:
        return Times(overlap={count: [] for count in self._in_flight})

    def _plain(self, times: Times, compute_s: float, count: int) -> None:
        forward = self._forward(compute_s)
        waited_us = self._client.counters().get("wait_us", 0)
        start = time.perf_counter()
        for ids_TK in self._ids[:count]:
            forward(ids_TK)
        took = time.perf_counter() - start
        waited = (self._client.counters()["wait_us"] - waited_us) * 1e-6
        times.plain.append(took / (count * self._layers))
        times.computed.append((took - waited) / (count * self._layers))

    def _overlap(self, times: Times, compute_s: float, count: int) -> None:
        overlap = DoubleBatchOverlap(self._client, num_micro_batches=count)
        start = time.perf_counter()
        overlap.map(self._forward(compute_s), self._ids[:count])
        took = time.perf_counter() - start
        times.overlap[count].append(took / (count * self._layers))

    def _forward(self, compute_s: float) -> Callable[[Tensor], None]:
        def forward(ids_TK: Tensor) -> None:
            x_TD = self._x_TD
            for _ in range(self._layers):
                compute(compute_s)
                ticket = self._client.dispatch(
                    LAYER, x_TD, ids_TK, self._weights_TK, num_experts=SIZES.num_experts
                )
                self._client.combine(ticket)

        return forward


def compute(seconds: float) -> None:
    """Use up some of this thread's time on a core, in small products as a model does."""
    end = time.thread_time() + seconds
    a = torch.ones(32, 32)
    while time.thread_time() < end:
        torch.mm(a, a)


def _figures(times: Times, overlap: list[float]) -> dict[str, float]:
    return {
        "plain_us": _us(median(times.plain)),
        "overlap_us": _us(median(overlap)),
        "overlap_min_us": _us(min(overlap)),
        "overlap_max_us": _us(max(overlap)),
        "speedup": round(median(times.plain) / median(overlap), 3),
        "a_us": _us(median(times.computed)),
    }


def _check(report: Report, costs: tuple[tuple[int, int], ...], in_flight: tuple[int, ...]) -> None:
    equal = "rows['a2 d2','N2']"
    report.add_check("speedup_equal_N2", f"{equal}.plain_us / {equal}.overlap_us", ">= 1.8")
    ratios = []
    for compute_ms, delay_ms in costs:
        for count in in_flight:
            row = f"rows['a{compute_ms} d{delay_ms}','N{count}']"
            ideal = f"max({row}.a_us, ({row}.a_us + {row}.d_us) / {count})"
            ratios.append(f"{row}.overlap_us / {ideal}")
    report.add_check("worst_vs_ideal", f"max(0, {', '.join(ratios)})", "<= 1.1")


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
