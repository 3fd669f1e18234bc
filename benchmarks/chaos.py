"""Forwards while processes fail by a schedule, beside the same number of forwards in peace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.failing_cluster import FailingCluster, Hit, run_clients
from benchmarks.failover_roles import Kind
from benchmarks.marks import Marks
from benchmarks.nursery import Nursery
from benchmarks.schedule import Phase, for_clients
from torch_eaas.cli.report import Report

NUM_SERVERS = 4
PHASES_A_BLOCK = 5
WARM_UP = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """One row: who asks whom, and for how long."""

    kind: Kind
    """What is served."""

    num_clients: int
    """How many ask."""

    forwards: int
    """How many forwards to make under faults; as many follow in peace."""

    forwards_a_phase: int
    """How many forwards a phase has at least."""

    phases: Sequence[Phase]
    """The schedule; it begins again when it is over."""


def measure(report: Report, nursery: Nursery, marks: Marks, chaos: Chaos) -> None:
    """Add a row of a kind of servers and a number of clients."""
    clients = chaos.num_clients
    phases = itertools.cycle(for_clients(chaos.phases, NUM_SERVERS, clients))
    played: list[Phase] = []
    hits: list[Hit] = []
    faulty, calm = (0, 0.0), (0, 0.0)
    slowest_s = 0.0
    with FailingCluster(
        nursery, marks, chaos.kind, num_servers=NUM_SERVERS, num_clients=clients
    ) as cluster:
        cluster.await_well()
        run_clients(cluster, lambda: cluster.forward(WARM_UP))
        while faulty[0] < chaos.forwards:
            firsts = marks.done[:clients]
            block = list(itertools.islice(phases, PHASES_A_BLOCK))
            played += block
            play = partial(_play, cluster, block, chaos.forwards_a_phase, hits)
            made = run_clients(cluster, play)
            faulty = (faulty[0] + made[0], faulty[1] + made[1])
            slowest_s = max(slowest_s, _slowest(marks, firsts))
            made = run_clients(cluster, partial(cluster.forward, made[0]))
            calm = (calm[0] + made[0], calm[1] + made[1])
        report.add_row(
            chaos.kind.name,
            f"clients {clients}",
            forwards=faulty[0],
            calm_forwards=calm[0],
            failed=sum(marks.failed[:clients]),
            wrong=sum(marks.wrong[:clients]),
            faults=len(hits),
            faults_in_hand=sum(hit.in_hand for hit in hits),
            slowest_s=round(slowest_s, 4),
            busy_s=round(faulty[1], 3),
            calm_busy_s=round(calm[1], 3),
            schedule=played,
        )


def _play(
    cluster: FailingCluster, phases: Sequence[Phase], forwards_a_phase: int, hits: list[Hit]
) -> None:
    """Let the phases happen one after the other, and add what happened to ``hits``."""
    for phase in phases:
        before = sum(cluster.marks.done)
        hits += cluster.play(phase)
        cluster.await_well()
        cluster.forward(max(0, forwards_a_phase - (sum(cluster.marks.done) - before)))


def _slowest(marks: Marks, firsts: Sequence[int]) -> float:
    """Return the seconds of the slowest forward since these numbers."""
    took = [
        seconds
        for client, first in enumerate(firsts)
        for _, seconds in marks.forwards(client, first)
    ]
    return max(took, default=0.0)
