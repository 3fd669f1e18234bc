"""The device path on one GPU: right first, then how long a request takes beside plain copies.

Client and server are two streams of one process, then two processes over ``cuda_ipc``. Two
processes share a GPU by turns, unless MPS runs: then a waiting client keeps its server off the GPU
for milliseconds. Figures are given for both where MPS's daemon is there, and kills are done without
it, since MPS ends all of its clients together.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch

from benchmarks import gpu_path_latency as latency
from benchmarks.gpu_path_checks import (
    check_captures_beside_changes,
    check_fewer_tokens,
    check_joins,
    check_placements,
    check_streams,
    check_tokens,
    in_one_process,
)
from benchmarks.gpu_path_ends import QUICK, IdleSlab, Sizes
from benchmarks.gpu_path_lanes import (
    check_captures,
    check_eager_micro_batches,
    check_micro_batches,
)
from benchmarks.gpu_path_nvshmem import answers_between_pes
from benchmarks.gpu_path_processes import (
    DEEP,
    QUICK_DEEP,
    check_kills,
    in_processes,
    mps_runs,
    processes_with_mps,
)
from benchmarks.gpu_waits import calls_of, waits_in
from benchmarks.harness import CannotMeasure, Options, figures
from torch_eaas.cli.report import Report
from torch_eaas.device.captured_step import CapturedStep
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.errors import EaasError

BUDGET_S = 360
"""No part begins after so many seconds; what is left out is said in the report."""

REPLAYS = 300
PROFILED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is done."""

    checked: Sizes = field(default_factory=Sizes)
    deep: Sizes = DEEP
    deep_tokens: int = 16
    measured: Sizes = latency.R1
    tokens: tuple[int, ...] = latency.TOKENS
    replays: int = REPLAYS
    profiled: int = PROFILED
    rounds: int = 10
    wait: timedelta = timedelta(seconds=0.5)
    """What a killed server costs: two processes without MPS take turns of milliseconds."""


SMALL = Scale(
    checked=QUICK,
    deep=QUICK_DEEP,
    deep_tokens=4,
    measured=QUICK,
    tokens=(1, 16),
    replays=2,
    profiled=3,
    rounds=2,
    wait=timedelta(seconds=2),
)


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run: where, how much, and what was found."""

    device: torch.device
    scale: Scale
    rounds: int
    report: Report = field(default_factory=lambda: Report(name="gpu_path"))


def run(options: Options) -> Report:
    """Check, then measure.

    Raises:
        CannotMeasure: There is no GPU.
        WrongResult: An answer is not the local layer's; nothing is measured then.
    """
    with processes_with_mps(False):
        # the first that touches CUDA in this process
        if not torch.cuda.is_available():
            raise CannotMeasure(
                f"gpu_path needs a CUDA GPU, and torch {torch.__version__} sees none here; "
                "nothing was checked and nothing measured"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        scale = SMALL if options.quick else Scale()
        bench = Bench(device=device, scale=scale, rounds=options.rounds)
        bench.report.add_row("device", name=torch.cuda.get_device_name(device))
        return measure(bench)


def measure(bench: Bench) -> Report:
    """Run all parts, as far as the time goes."""
    began = time.monotonic()
    parts = [partial(part, bench) for part in (_one_process, _processes, _kills, _waits)]
    parts += [partial(_latency, bench, wire) for wire in latency.wires()]
    parts += [partial(part, bench) for part in (_between_processes, _nvshmem)]
    failed = 0
    for part in parts:
        key = (part.func.__name__.strip("_"), *part.args[1:])
        if time.monotonic() - began > BUDGET_S:
            bench.report.add_row("left out", *key, reason=f"{BUDGET_S} s were over")
            continue
        try:
            part()
        except EaasError as error:
            # no answer is not a wrong one: what else there is to find is found
            failed += 1
            bench.report.add_row("failed", *key, reason=_reason(error))
        seconds = round(time.monotonic() - began, 1)
        bench.report.add_row("until", *key, seconds=seconds)
        # where something hangs this tells what
        print(f"gpu_path: {' '.join(key)} ended after {seconds} s", file=sys.stderr, flush=True)
    bench.report.add_row("parts", failed=failed)
    _add_checks(bench.report)
    return bench.report


def _reason(error: EaasError) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def _one_process(bench: Bench) -> None:
    with in_one_process(bench.scale.checked, bench.device) as ends:
        compared = check_tokens(ends) + check_fewer_tokens(ends)
        compared += check_streams(ends) + check_captures_beside_changes(ends)
    with in_one_process(bench.scale.checked, bench.device, max_micro_batches=2) as ends:
        compared += check_eager_micro_batches(ends) + check_micro_batches(ends)
    with in_one_process(bench.scale.checked, bench.device, servers=2, combine="exact") as ends:
        compared += check_placements(ends, bench.scale.rounds)
        failed = ends.client.counters().get("failed_steps", 0)
    compared += check_joins(bench.scale.checked, bench.device)
    check_captures(bench.device, bench.scale.rounds)
    bench.report.add_row("checked", "streams", results=compared, replays_repeated=failed)


def _processes(bench: Bench) -> None:
    with in_processes(bench.scale.checked, bench.device, servers=1) as (ends, _):
        compared = check_tokens(ends) + check_fewer_tokens(ends)
    bench.report.add_row("checked", "processes", results=compared)


def _kills(bench: Bench) -> None:
    scale = bench.scale
    found = check_kills(scale.deep, bench.device, num_tokens=scale.deep_tokens, wait=scale.wait)
    bench.report.add_row(
        "kills",
        f"L{scale.deep.layers}",
        wrong_tokens=found.wrong_tokens,
        failed_steps=found.failed_steps,
        usual_ms=round(found.usual_s * 1000, 2),
        between_ms=round(found.between_s * 1000, 2),
        within_ms=round(found.within_s * 1000, 2),
    )


def _waits(bench: Bench) -> None:
    """Count what the host waits for: nothing in replays, and one read of the words in a step."""
    count = bench.scale.profiled
    with in_one_process(bench.scale.checked, bench.device) as ends:
        given = ends.batch(bench.scale.checked.max_tokens, 1)
        experts = ends.experts(0)
        with torch.no_grad():
            step = CapturedStep(ends.client, lambda: experts(*given))
        for name, replay in (("replays", step._captured.replay), ("steps", step.run)):
            calls = calls_of(replay, count)
            bench.report.add_row("waits", name, count=waits_in(calls), of=count, calls=str(calls))


def _latency(bench: Bench, wire: str) -> None:
    scale, device = bench.scale, bench.device
    for name, slab in (("idle", IdleSlab), ("experts", ExpertSlab)):
        options = latency.options_of(wire)
        with in_one_process(scale.measured, device, slab=slab, **options) as ends:
            for count in scale.tokens:
                key = ("latency", wire, name, f"T{count}")
                times = latency.graph_seconds(ends, count, scale.replays)
                bench.report.add_row(*key, "graph", **figures([times]))
                if name == "idle":
                    times = latency.eager_seconds(ends, count, scale.replays)
                    bench.report.add_row(*key, "eager", **figures([times]))
    for count in scale.tokens:
        if not bench.report.has_rows(("floor", f"T{count}")):
            times = latency.floor_seconds(scale.measured, count, bench.rounds, device)
            bench.report.add_row("floor", f"T{count}", **figures([[s] for s in times]))


def _between_processes(bench: Bench) -> None:
    scale = bench.scale
    ways = {"without MPS": False}
    if mps_runs():
        ways["with MPS"] = True
    else:
        bench.report.add_row(
            "left out",
            "processes with MPS",
            reason="its daemon does not run here; start it with nvidia-cuda-mps-control -d",
        )
    for name, with_mps in ways.items():
        try:
            with processes_with_mps(with_mps):
                found = latency.seconds_between_processes(
                    scale.measured,
                    bench.device,
                    wire="bf16",
                    tokens=[count for count in scale.tokens if count in (1, 16, 64)],
                    # a turn takes milliseconds
                    replays=scale.replays if with_mps else max(2, scale.replays // 30),
                )
        except EaasError as error:
            bench.report.add_row("left out", f"processes {name}", reason=_reason(error))
            continue
        for count, times in found.items():
            bench.report.add_row("processes", name, f"T{count}", **figures([times]))


def _nvshmem(bench: Bench) -> None:
    """Try two PEs on this GPU; that they do not start is no failure."""
    try:
        with processes_with_mps(mps_runs()):
            compared = answers_between_pes(bench.scale.checked, bench.device)
        bench.report.add_row("checked", "nvshmem", results=compared)
    except EaasError as error:
        bench.report.add_row("left out", "two PEs", reason=_reason(error))


def _add_checks(report: Report) -> None:
    """Add the targets of what was measured."""
    layers = [row["key"][1] for row in report.rows if row["key"][0] == "kills"]
    kills = ("kills", layers[0] if layers else "none")
    replays, steps = ("waits", "replays"), ("waits", "steps")
    one, many = ("latency", "bf16", "idle", "T1"), ("latency", "bf16", "idle", "T64")
    floor, mps = ("floor", "T64"), ("processes", "with MPS", "T1")
    for name, formula, target, keys in (
        ("failed_parts", "{0}.failed", "== 0", [("parts",)]),
        ("wrong_tokens", "{0}.wrong_tokens", "== 0", [kills]),
        ("waits_in_replays", "{0}.count", "== 0", [replays]),
        ("waits_per_step", "{0}.count / {0}.of", "<= 1", [steps]),
        ("graph_1_token_us", "{0}.p50_us", "<= 12", [(*one, "graph")]),
        (
            "graph_64_tokens_vs_floor",
            "({0}.p50_us - 8) / {1}.p50_us",
            "<= 1.5",
            [(*many, "graph"), floor],
        ),
        ("mps_1_token_us", "{0}.p50_us", "<= 12", [mps]),
    ):
        if report.has_rows(*keys):
            rows = [f"rows[{', '.join(map(repr, key))}]" for key in keys]
            report.add_check(name, formula.format(*rows), target)
