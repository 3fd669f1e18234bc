"""Forwards while processes fail by a schedule, beside the same number of forwards in peace.

What a fault costs is compared phase by phase: forwards under a fault, then as many in peace, so
that what else the machine does falls upon both. A phase in which a client faults is not timed: the
other clients have the servers for themselves meanwhile, and are faster than in peace. What a client
stood still itself is not counted as its forward's time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.failing_cluster import FailingCluster, Hit, run_clients
from benchmarks.failover_roles import Kind
from benchmarks.marks import Marks
from benchmarks.nursery import Nursery
from benchmarks.schedule import STOP, Phase, for_clients
from torch_eaas.cli.report import Report

NUM_SERVERS = 4
WARM_UP = 50

Timed = tuple[int, float]
"""Forwards, and the seconds that they took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """One row: who asks whom, and for how long."""

    kind: Kind
    """What is served."""

    num_clients: int
    """How many ask."""

    forwards: int
    """How many forwards to make under faults at least."""

    forwards_a_phase: int
    """How many forwards a phase has at least."""

    phases: Sequence[Phase]
    """The schedule; it begins again when it is over."""

    num_phases: int = 1
    """How many phases to play at least."""


@dataclass(slots=True)
class _Tally:
    """What has happened in a row so far."""

    played: list[Phase] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    forwards: int = 0
    faulty: Timed = (0, 0.0)
    calm: Timed = (0, 0.0)
    slowest_s: float = 0.0
    slowest_phase: int = -1
    met: Timed = (0, 0.0)
    declared_dead: int = 0


def measure(report: Report, nursery: Nursery, marks: Marks, chaos: Chaos) -> None:
    """Add a row of a kind of servers and a number of clients."""
    clients = chaos.num_clients
    phases = itertools.cycle(for_clients(chaos.phases, NUM_SERVERS, clients))
    tally = _Tally()
    with FailingCluster(
        nursery, marks, chaos.kind, num_servers=NUM_SERVERS, num_clients=clients
    ) as cluster:
        cluster.await_well()
        run_clients(cluster, lambda: cluster.forward(WARM_UP))
        while (
            tally.forwards < chaos.forwards
            or len(tally.played) < chaos.num_phases
            or not tally.faulty[0]
        ):
            _measure_phase(cluster, chaos, next(phases), tally)
    usual_s = tally.calm[1] / tally.calm[0]
    report.add_row(
        chaos.kind.name,
        f"clients {clients}",
        forwards=tally.forwards,
        failed=sum(marks.failed[:clients]),
        wrong=sum(marks.wrong[:clients]),
        faults=len(tally.hits),
        faults_in_hand=sum(hit.in_hand for hit in tally.hits),
        declared_dead=tally.declared_dead,
        slowest_s=round(tally.slowest_s, 4),
        slowest_phase=tally.slowest_phase,
        timed_forwards=tally.faulty[0],
        busy_s=round(tally.faulty[1], 3),
        calm_forwards=tally.calm[0],
        calm_busy_s=round(tally.calm[1], 3),
        paused_s=round(tally.met[1] - tally.met[0] * usual_s, 3),
        schedule=tally.played,
    )


def _measure_phase(cluster: FailingCluster, chaos: Chaos, phase: Phase, tally: _Tally) -> None:
    marks, clients = cluster.marks, chaos.num_clients
    firsts = marks.done[:clients]
    hits: list[Hit] = []
    made = run_clients(cluster, partial(_play, cluster, phase, chaos.forwards_a_phase, hits, tally))
    tally.played.append(phase)
    tally.hits += hits
    tally.forwards += made[0]
    slowest_s = slowest(marks, firsts, hits)
    if slowest_s > tally.slowest_s:
        tally.slowest_s, tally.slowest_phase = slowest_s, len(tally.played) - 1
    if not any(phase[NUM_SERVERS:-1]):
        tally.faulty = _plus(tally.faulty, made)
        tally.met = _plus(tally.met, met(marks, firsts, hits))
        made = run_clients(cluster, partial(cluster.forward, made[0]))
        tally.calm = _plus(tally.calm, made)


def _play(
    cluster: FailingCluster, phase: Phase, num_forwards: int, hits: list[Hit], tally: _Tally
) -> None:
    """Let a phase happen, and note the hits; at its end all is well again."""
    before = sum(cluster.marks.done)
    # where nobody else faults, nobody is to be taken for dead
    is_watched = phase[-1] == STOP and not any(phase[:-1])
    expired = cluster.monitor.leases_expired() if is_watched else 0
    hits += cluster.play(phase)
    cluster.await_well()
    cluster.forward(max(0, num_forwards - (sum(cluster.marks.done) - before)))
    # a server that was stopped for longer than its lease loses its pairs only now, for a moment
    cluster.await_well()
    if is_watched:
        tally.declared_dead += cluster.monitor.leases_expired() - expired


def slowest(marks: Marks, firsts: Sequence[int], hits: Sequence[Hit]) -> float:
    """Return the seconds of the slowest forward; what its client stood still does not count."""
    longest_s = 0.0
    for client, first in enumerate(firsts):
        stops = [hit.stood_still for hit in hits if hit.process == NUM_SERVERS + client]
        for start, took in marks.forwards(client, first):
            own_s = took - sum(_overlap(stop, start, start + took) for stop in stops if stop)
            longest_s = max(longest_s, own_s)
    return longest_s


def met(marks: Marks, firsts: Sequence[int], hits: Sequence[Hit]) -> Timed:
    """Return the forwards that met a server that was hit, and what they took.

    They are those under way at that moment and the next ones: a client that had its answer already
    meets the silent server then.
    """
    times = [hit.at for hit in hits if hit.process < NUM_SERVERS]
    took_s: list[float] = []
    for client, first in enumerate(firsts):
        made = marks.forwards(client, first)
        for at in times:
            since = [took for start, took in made if start + took >= at]
            took_s += since[:2]
    return len(took_s), sum(took_s)


def _overlap(stop: tuple[float, float], start: float, end: float) -> float:
    return max(0.0, min(stop[1], end) - max(stop[0], start))


def _plus(a: Timed, b: Timed) -> Timed:
    return a[0] + b[0], a[1] + b[1]
