"""Clients that die at any step of the protocol leave nothing behind in their server."""

from __future__ import annotations

from benchmarks.client_kills import measure
from benchmarks.failover import DELAYED
from benchmarks.marks import Marks
from benchmarks.nursery import Nursery
from torch_eaas.cli.report import Report

WINDOW_BYTES = 1 << 17
"""Each of a pair's two windows is larger."""


def test_a_server_keeps_no_memory_descriptor_window_or_thread_of_clients_that_were_killed() -> None:
    marks = Marks(1, 1)
    report = Report(name="kills")
    with Nursery(marks) as nursery:
        measure(report, nursery, marks, DELAYED, kills=60, seed=1)
    [row] = report.rows
    assert row["died"] == 60
    assert row["rss_bytes_per_kill"] < WINDOW_BYTES / 8
    assert row["descriptors_last"] <= row["descriptors_first"]
    assert row["threads_last"] <= row["threads_first"]
    assert row["windows_last"] == 0
