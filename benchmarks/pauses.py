"""How much longer a forward takes when a server that holds much memory is killed under it."""

from __future__ import annotations

import time

from benchmarks.failing_cluster import FailingCluster, run_clients
from benchmarks.failover_roles import Kind
from benchmarks.marks import IDLE, RUN, Marks
from benchmarks.nursery import Nursery
from benchmarks.schedule import KILL
from torch_eaas.cli.report import Report, median

BETWEEN = 60
"""Forwards between two kills."""

BOTH_DOWN_S = 0.5
"""How long nobody holds an expert."""


def measure_pauses(
    report: Report, nursery: Nursery, marks: Marks, kind: Kind, *, kills: int, ballast_bytes: int
) -> None:
    """Add a row of pauses: the interrupted forward's time beyond the usual one."""
    pauses_ms: list[float] = []
    in_hand = 0
    with FailingCluster(
        nursery, marks, kind, num_servers=2, num_clients=1, ballast_bytes=ballast_bytes
    ) as cluster:
        cluster.await_well()
        run_clients(cluster, lambda: cluster.forward(BETWEEN))
        usual_s = median([took for _, took in marks.forwards(0, 0)[BETWEEN // 2 :]])
        cluster.command(RUN)
        for _ in range(kills):
            cluster.await_well()
            cluster.forward(BETWEEN)
            first = marks.done[0]
            [hit] = cluster.play([KILL, 0, 0, 0])
            cluster.forward(2)
            if hit.in_hand:
                in_hand += 1
                # one request may still end, and the next be the one that was hit
                took_s = max(
                    took
                    for start, took in marks.forwards(0, max(0, first - 1))
                    if start <= hit.until and hit.at <= start + took
                )
                pauses_ms.append(1000 * (took_s - usual_s))
        cluster.await_well()
        cluster.command(IDLE)
        report.add_row(
            "pause",
            kills=kills,
            in_hand=in_hand,
            usual_ms=round(1000 * usual_s, 2),
            ballast_mib=ballast_bytes >> 20,
            failed=marks.failed[0],
            wrong=marks.wrong[0],
            pauses_ms=[round(pause, 2) for pause in pauses_ms],
        )


def measure_both_down(report: Report, nursery: Nursery, marks: Marks, kind: Kind) -> None:
    """Add a row of one forward under which both holders died, and were started again."""
    with FailingCluster(nursery, marks, kind, num_servers=2, num_clients=1) as cluster:
        cluster.await_well()
        run_clients(cluster, lambda: cluster.forward(BETWEEN))
        first = marks.done[0]
        cluster.command(RUN)
        cluster.forward(5)
        cluster.kill_servers()
        time.sleep(BOTH_DOWN_S)
        cluster.start_servers()
        cluster.forward(5)
        cluster.await_well()
        cluster.command(IDLE)
        report.add_row(
            "both down",
            down_s=BOTH_DOWN_S,
            recovered_s=round(max(took for _, took in marks.forwards(0, first)), 3),
            failed=marks.failed[0],
            wrong=marks.wrong[0],
        )
