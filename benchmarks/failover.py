"""Failures cost nothing: right answers, and in time, while processes are killed and stopped.

1 and 2 clients ask 4 servers and check every answer against their own; every expert has two
holders, and a monitor tells who holds what. A schedule with a seed (its form: benchmarks.schedule)
kills, stops and restarts servers, clients and the monitor. ``delayed`` servers take a planned time
and no core; ``real`` ones compute for as long.

``throughput_loss_pct`` compares seconds a forward under faults with seconds a forward in peace,
phase by phase, for the ``delayed`` servers alone: their delay is most of a forward, so two cores
stay half idle, and neither a restart nor a wake-up that has to wait for a core is what is measured.
``paused_pct`` is what the forwards alone took longer that met a server just hit: in it is no gain
from a server less to ask, and no loss from a restart beside them.

``--forwards N`` says how many forwards are made under faults, over all rows. ``--schedule FILE``
plays another schedule, for 4 servers, 2 clients and the monitor. ``--kills N`` says how many
clients are killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch

from benchmarks import chaos, client_kills, pauses
from benchmarks.chaos import NUM_SERVERS
from benchmarks.failover_roles import Kind
from benchmarks.harness import Options
from benchmarks.marks import Marks
from benchmarks.nursery import Nursery
from benchmarks.schedule import KILL, STOP, Phase, load_schedule, random_schedule
from benchmarks.servers import Sizes
from torch_eaas.cli.report import Report

SEED = 3

DELAYED = Kind(
    name="delayed",
    sizes=Sizes(hidden=64, intermediate=32, num_experts=8, top_k=2),
    num_tokens=8,
    delay=timedelta(milliseconds=8),
)
BRISK = replace(DELAYED, name="brisk", delay=timedelta(milliseconds=4))
"""For pauses: asking another server again costs its delay, and is not what is measured."""

REAL = Kind(
    name="real",
    sizes=Sizes(hidden=256, intermediate=256, num_experts=16, top_k=4),
    num_tokens=64,
    delay=timedelta(0),
)
PARTS = ((DELAYED, 1, 0.35), (DELAYED, 2, 0.35), (REAL, 1, 0.15), (REAL, 2, 0.15))
"""Servers, clients, and their part of all forwards."""

QUICK_PARTS = ((DELAYED, 2, 0.4),)
MAX_CLIENTS = 2
NUM_PHASES = 80
FORWARDS_A_PHASE = 175
"""Forwards from one fault to the next at least: it makes at most 57 faults in 10,000."""

FORWARDS_A_PAUSE = 200
MAX_PAUSES = 50
QUICK_FORWARDS = 100
QUICK_PHASES = (
    (KILL, 0, 0, 0, 0, 0, 0),
    (0, 0, STOP, 0, 0, 0, 0),
    (0, 0, 0, 0, KILL, 0, 0),
    (0, 0, 0, 0, 0, STOP, 0),
    (0, 0, 0, 0, 0, 0, KILL),
    (0, 0, 0, 0, 0, 0, STOP),
)
"""One of each kind."""

QUICK_KILLS = 10


def run(options: Options) -> Report:
    """Measure all parts."""
    torch.set_num_threads(1)
    forwards = QUICK_FORWARDS if options.quick else options.forwards
    kills = QUICK_KILLS if options.quick else options.kills
    parts = QUICK_PARTS if options.quick else PARTS
    report = Report(name="failover")
    marks = Marks(NUM_SERVERS, MAX_CLIENTS)
    phases = _phases(options)
    with Nursery(marks) as nursery:
        for number, (kind, clients, part) in enumerate(parts):
            # each row begins elsewhere, so that short runs see all kinds of faults
            start = number * len(phases) // len(parts)
            what = chaos.Chaos(
                kind=kind,
                num_clients=clients,
                forwards=round(part * forwards),
                forwards_a_phase=10 if options.quick else FORWARDS_A_PHASE,
                phases=[*phases[start:], *phases[:start]],
                num_phases=len(phases) if options.quick else 1,
            )
            chaos.measure(report, nursery, marks, what)
        pauses.measure_both_down(report, nursery, marks, BRISK)
        pauses.measure_pauses(
            report,
            nursery,
            marks,
            BRISK,
            kills=max(3, min(MAX_PAUSES, forwards // FORWARDS_A_PAUSE)),
            ballast_bytes=(64 if options.quick else 1024) << 20,
        )
        client_kills.measure(report, nursery, marks, BRISK, kills=kills, seed=SEED)
    _check(report, parts)
    return report


def _phases(options: Options) -> Sequence[Phase]:
    if options.schedule is not None:
        return load_schedule(options.schedule, NUM_SERVERS, MAX_CLIENTS)
    if options.quick:
        return QUICK_PHASES
    return random_schedule(SEED, NUM_PHASES, NUM_SERVERS, MAX_CLIENTS)


def _check(report: Report, parts: Sequence[tuple[Kind, int, float]]) -> None:
    named = {f"rows['{kind.name}','clients {clients}']": kind for kind, clients, _ in parts}
    chaotic = list(named)
    every = [*chaotic, "rows['both down']", "rows['pause']"]
    report.add_check("failed", _sum(every, "failed"), "== 0")
    report.add_check("wrong", _sum(every, "wrong"), "== 0")
    report.add_check("declared_dead", _sum(chaotic, "declared_dead"), "== 0")
    slowest = ", ".join(f"{row}.slowest_s" for row in chaotic)
    report.add_check("slowest_s", f"max(0, {slowest})", "<= 1.05")
    report.add_check("faults_in_hand", _sum(chaotic, "faults_in_hand"), ">= 30")
    report.add_check(
        "faults_per_10k",
        f"10000 * ({_sum(chaotic, 'faults')}) / ({_sum(chaotic, 'forwards')})",
        ">= 50",
    )
    report.add_check("pause_p50_ms", "percentile(rows['pause'].pauses_ms, 50)", "<= 20")
    report.add_check("pause_p99_ms", "percentile(rows['pause'].pauses_ms, 99)", "<= 20")
    timed = [row for row, kind in named.items() if kind is DELAYED]
    # seconds a forward in peace, over seconds a forward under faults
    report.add_check(
        "throughput_loss_pct",
        f"100 - 100 * (({_sum(timed, 'calm_busy_s')}) / ({_sum(timed, 'calm_forwards')}))"
        f" / (({_sum(timed, 'busy_s')}) / ({_sum(timed, 'timed_forwards')}))",
        "<= 2",
    )
    paused, busy = _sum(timed, "paused_s"), _sum(timed, "busy_s")
    report.add_check("paused_pct", f"100 * ({paused}) / ({busy})", "<= 2")
    report.add_check("rss_bytes_per_kill", "rows['client kills'].rss_bytes_per_kill", "<= 1024")
    report.add_check(
        "descriptors_grown",
        "rows['client kills'].descriptors_last - rows['client kills'].descriptors_first",
        "<= 0",
    )
    report.add_check(
        "windows_left",
        "rows['client kills'].windows_last + rows['client kills'].shm_files_last"
        " - rows['client kills'].shm_files_first",
        "<= 0",
    )


def _sum(rows: list[str], field: str) -> str:
    return " + ".join(f"{row}.{field}" for row in rows)
