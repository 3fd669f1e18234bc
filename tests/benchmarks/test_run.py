"""Each benchmark from the command line to its file; no figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.failing_cluster import STOPS_S
from benchmarks.schedule import KILL, STOP
from torch_eaas.cli.report import recompute

ROOT = Path(__file__).parents[2]


def measure(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *argv]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )


def quick(name: str, folder: Path) -> dict[str, Any]:
    target = folder / f"{name}.json"
    done = measure(name, "--quick", "--skip-tests", "--json", str(target))
    assert (done.returncode, done.stderr) == (0, "")
    written: dict[str, Any] = json.loads(target.read_text())
    assert list(written) == ["name", "commit", "machine", "versions", "rows", "checks"]
    assert written["name"] == name
    for check, again in zip(written["checks"], recompute(written), strict=True):
        assert (check["value"], check["ok"]) == (again.value, again.ok)
        assert check["name"] in done.stdout
    return written


def test_transport_carries_each_size_each_way(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="zmq is one of the ways")
    written = quick("transport", tmp_path)
    keys = {tuple(row["key"]) for row in written["rows"]}
    sizes = ("64B", "14k", "900k")
    assert {(name, size) for name in ("shm", "pipe", "gloo", "zmq") for size in sizes} <= keys
    names = {check["name"] for check in written["checks"]}
    assert {"shm_14k_vs_gloo", "shm_14k_vs_zmq", "shm_900k_vs_zmq"} <= names
    # the floor needs a C compiler, and says so where there is none
    has_floor = ("floor", "14k") in keys
    assert has_floor == ({"shm_14k_vs_floor", "shm_900k_vs_floor"} <= names)


def test_layer_compares_remote_and_local_experts(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the local experts are transformers'")
    written = quick("layer", tmp_path)
    keys = {tuple(row["key"]) for row in written["rows"]}
    for tokens in ("T1", "T8", "T64", "T256"):
        assert {("bf16", tokens, way) for way in ("eager", "grouped_mm", "remote")} <= keys
    assert ("bookkeeping", "N32", "T8") in keys
    names = {check["name"] for check in written["checks"]}
    assert {"bookkeeping_3_us", "bookkeeping_32_us", "wait_extra_p99_us"} <= names


def test_dbo_compares_micro_batches_that_overlap_with_the_same_in_a_row(tmp_path: Path) -> None:
    written = quick("dbo", tmp_path)
    rows = {tuple(row["key"]): row for row in written["rows"]}
    row = rows["a2 d2", "N2"]
    # how fast it is depends on the machine; it computes at least what it has to
    assert row["ideal_us"] >= row["a_us"] >= 2000 <= row["overlap_us"]
    assert ("cut in two", "N2") in rows
    assert [check["name"] for check in written["checks"]] == ["speedup_equal_N2", "worst_vs_ideal"]


def test_cpu_experts_compares_with_each_way_and_with_the_floor(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the other experts are transformers'")
    written = quick("cpu_experts", tmp_path)
    keys = {tuple(row["key"]) for row in written["rows"]}
    ways = {"eager", "grouped_mm", "ours", "floor"}
    for threads in ("1 thr", "2 thr"):
        for tokens, more in (("T1", {"batched_mm"}), ("T4", {"batched_mm"}), ("T256", set())):
            found = {way for *case, way in keys if case == [threads, "bf16", tokens]}
            assert found == ways | more | {"ours_fp8"}
        assert {(threads, "fp32", "T16", way) for way in ways} <= keys
        assert {(threads, "many", "A8", way) for way in ways} <= keys
    names = {check["name"] for check in written["checks"]}
    assert names >= {"T1_vs_grouped_mm", "T16_vs_grouped_mm", "T4_vs_floor", "worst_vs_best"}


def test_failover_answers_everything_while_processes_die(tmp_path: Path) -> None:
    written = quick("failover", tmp_path)
    values = {check["name"]: check["value"] for check in written["checks"]}
    assert (values["failed"], values["wrong"], values["declared_dead"]) == (0, 0, 0)
    # the client was the second to be stopped, and what it stood still is not its forward's time
    assert values["slowest_s"] < STOPS_S[1]
    rows = {tuple(row["key"]): row for row in written["rows"]}
    chaos = rows["delayed", "clients 2"]
    assert chaos["forwards"] >= 40
    # a server, a client and the monitor, each killed once and stopped once
    assert chaos["faults"] == 6
    assert [sum(phase) for phase in chaos["schedule"]] == [KILL, STOP] * 3
    assert 1 <= chaos["faults_in_hand"] <= 2
    assert 0 < chaos["timed_forwards"] < chaos["forwards"]
    assert rows["both down",]["recovered_s"] > rows["both down",]["down_s"]
    assert len(rows["pause",]["pauses_ms"]) == rows["pause",]["in_hand"]
    assert rows["client kills",]["died"] == rows["client kills",]["kills"]


def test_an_unknown_name_is_a_usage_error() -> None:
    done = measure("nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
