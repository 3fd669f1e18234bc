"""The device path's benchmark without a GPU: what it says, and that its parts run, by the twins."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_path, gpu_path_nvshmem, gpu_path_processes
from benchmarks import gpu_path_latency as latency
from benchmarks.gpu_path import SMALL, Bench
from benchmarks.gpu_path_checks import (
    check_fewer_tokens,
    check_joins,
    check_placements,
    check_tokens,
    in_one_process,
    wrong_tokens,
)
from benchmarks.gpu_path_ends import QUICK, local_layer
from benchmarks.gpu_path_latency import wires
from benchmarks.gpu_path_processes import (
    MPS_DIRECTORY,
    QUICK_DEEP,
    check_kills,
    processes_with_mps,
)
from benchmarks.harness import WrongResult
from torch_eaas.cli.report import Report
from torch_eaas.errors import PeerGone, TransportError
from torch_eaas.expert_slab import ExpertSlab

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
EXACT = replace(QUICK, storage="fp32", dtype=torch.float32)


def small_bench() -> Bench:
    return Bench(device=CPU, scale=SMALL, rounds=1)


def keys(report: Report) -> set[tuple[str, ...]]:
    return {tuple(row["key"]) for row in report.rows}


def row(report: Report, *key: str) -> dict[str, Any]:
    [found] = [row for row in report.rows if row["key"] == list(key)]
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu_path", "--json", str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.strip() == (
        f"gpu_path needs a CUDA GPU, and torch {torch.__version__} sees none here; "
        "nothing was checked and nothing measured"
    )
    assert not target.exists()


@pytest.mark.parametrize("wire", wires())
def test_answers_of_every_size_are_compared_eager_captured_and_in_a_larger_graph(
    wire: str,
) -> None:
    with in_one_process(QUICK, CPU, wire_dtype=wire) as ends:
        # 0, 1 and 7 tokens, each called once and replayed three times
        assert check_tokens(ends) == 3 * 4
        assert check_fewer_tokens(ends) == 5


def test_experts_move_under_one_graph_and_their_old_holder_is_asked_once_more() -> None:
    with in_one_process(EXACT, CPU, servers=2, combine="exact") as ends:
        assert check_placements(ends, 2) == 5
        counters = ends.client.counters()
        assert counters["failed_steps"] == counters["refused_unknown_expert"] > 0


def test_a_server_comes_and_the_other_leaves_under_one_graph() -> None:
    assert check_joins(EXACT, CPU) == 3


def test_the_local_layer_is_each_tokens_weighted_experts() -> None:
    weights = EXACT.weights()
    x_TD, ids_TK, weights_TK = EXACT.batch(3, 0, CPU)
    ids_TK[1] = torch.tensor([2, -1])
    got_TD = local_layer(EXACT, weights, 1, x_TD, ids_TK, weights_TK)
    w, x_D = weights[1, 2], x_TD[1].double()
    gate_I, up_I = w.gate_ID.double() @ x_D, w.up_ID.double() @ x_D
    wanted_D = weights_TK[1, 0] * (w.down_DI.double() @ (gate_I * gate_I.sigmoid() * up_I))
    torch.testing.assert_close(got_TD[1], wanted_D)


class WrongSlab(ExpertSlab):
    def run(self, x_MD: Tensor, *args: Any, **more: Any) -> Tensor:
        rows_ND = super().run(x_MD, *args, **more)
        rows_ND[:, -1] *= 1.5
        return rows_ND


def test_a_wrong_answer_is_seen_before_anything_is_measured() -> None:
    with (
        in_one_process(QUICK, CPU, slab=WrongSlab) as ends,
        pytest.raises(WrongResult, match=r"1 tokens, layer 1, eager: off by \S+, the largest num"),
    ):
        check_tokens(ends)


def test_a_token_is_wrong_if_a_bit_is_other_or_not_a_number() -> None:
    wanted = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    got = wanted.clone()
    assert wrong_tokens(got, wanted) == 0
    got[0, 1], got[2, 0] = 2.0000002, float("nan")
    assert wrong_tokens(got, wanted) == 2
    assert wrong_tokens(got[:2], wanted) == 3


def test_servers_killed_between_replays_and_within_one_cost_no_bit() -> None:
    sizes = replace(QUICK_DEEP, storage="fp32", dtype=torch.float32)
    found = check_kills(sizes, CPU, num_tokens=4, wait=SMALL.wait)
    assert found.wrong_tokens == 0
    assert min(found.usual_s, found.between_s, found.within_s) > 0


def test_what_the_host_waits_for_is_a_row_and_a_check() -> None:
    bench = small_bench()
    gpu_path._waits(bench)
    assert row(bench.report, "waits", "replays")["of"] == SMALL.profiled
    bench.report.add_row("kills", "L5", wrong_tokens=0)
    gpu_path._add_checks(bench.report)
    checks = {check.name: (check.value, check.ok) for check in bench.report.checks}
    assert checks == {
        "wrong_tokens": (0, True),
        "waits_in_replays": (0, True),
        "waits_per_step": (0, True),
    }


def test_latency_has_a_row_for_each_size_and_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "REQUESTS", 2)
    bench = small_bench()
    gpu_path._latency(bench, "bf16")
    assert keys(bench.report) == {
        *(
            ("latency", "bf16", *more, count, how)
            for more, how in ((("idle",), "graph"), (("idle",), "eager"), (("experts",), "graph"))
            for count in ("T1", "T16")
        ),
        ("floor", "T1"),
        ("floor", "T16"),
    }
    gpu_path._latency(bench, "fp1")
    assert (
        "wire_dtype must be one of" in row(bench.report, "left out", "latency fp1 idle")["reason"]
    )


def test_a_request_is_the_graphs_time_over_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "REQUESTS", 4)
    monkeypatch.setattr(latency, "_seconds", lambda run: (run(), 12.0)[1])
    with in_one_process(QUICK, CPU) as ends:
        assert latency.graph_seconds(ends, 1, 2) == [3.0, 3.0]


def test_targets_follow_from_the_rows() -> None:
    report = Report(name="gpu_path")
    report.add_row("checks", failed=1)
    report.add_row("kills", "L60", wrong_tokens=0)
    report.add_row("waits", "replays", count=0, of=100)
    report.add_row("waits", "steps", count=100, of=100)
    report.add_row("latency", "bf16", "idle", "T1", "graph", p50_us=11.0)
    report.add_row("latency", "bf16", "idle", "T64", "graph", p50_us=18.0)
    report.add_row("floor", "T64", p50_us=5.0)
    report.add_row("processes", "with MPS", "T1", p50_us=13.0)
    gpu_path._add_checks(report)
    found = {check.name: (check.value, check.ok) for check in report.checks}
    assert found == {
        "failed_checks": (1, False),
        "wrong_tokens": (0, True),
        "waits_in_replays": (0, True),
        "waits_per_step": (1, True),
        "graph_1_token_us": (11, True),
        "graph_64_tokens_vs_floor": (2, False),
        "mps_1_token_us": (13, False),
    }


@pytest.mark.parametrize("runs", [False, True], ids=["no daemon", "daemon"])
def test_processes_are_measured_without_mps_and_with_it_where_it_runs(
    runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str | None, int]] = []

    def measure(*args: Any, tokens: Any, replays: int, **more: Any) -> dict[int, list[float]]:
        asked.append((os.environ.get(MPS_DIRECTORY), replays))
        if len(asked) == 2:
            raise PeerGone("worker 7 ended with -11")
        return {1: [2e-5]}

    monkeypatch.setattr(gpu_path, "mps_runs", lambda: runs)
    monkeypatch.setattr(latency, "seconds_between_processes", measure)
    bench = small_bench()
    gpu_path._between_processes(bench)
    assert asked[0] == ("/nonexistent/no-mps", 2)
    assert row(bench.report, "processes", "without MPS", "T1")["p50_us"] == 20
    if runs:
        assert asked[1] == (gpu_path_processes._GIVEN_DIRECTORY, SMALL.replays)
        reason = row(bench.report, "left out", "processes with MPS")["reason"]
        assert reason == "worker 7 ended with -11"
    else:
        reason = row(bench.report, "left out", "processes with MPS")["reason"]
        assert "start it with nvidia-cuda-mps-control -d" in reason


@pytest.mark.skipif(find_spec("nvshmem") is not None, reason="NVSHMEM is installed")
def test_a_pe_that_cannot_start_says_what_is_missing() -> None:
    here, there = Pipe()
    gpu_path_nvshmem.be_pe(there, "server", QUICK, "cpu")
    kind, text = here.recv()
    assert kind == "error"
    assert text.startswith("server: ConfigError: ")
    assert "nvshmem" in text


def test_two_pes_are_compared_or_left_out_with_their_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> int:
        raise TransportError("server: ConfigError: no NVSHMEM here")

    bench = small_bench()
    monkeypatch.setattr(gpu_path, "answers_between_pes", fail)
    gpu_path._nvshmem(bench)
    reason = row(bench.report, "left out", "nvshmem")["reason"]
    assert reason == "TransportError: server: ConfigError: no NVSHMEM here"
    monkeypatch.setattr(gpu_path, "answers_between_pes", lambda *_: 17)
    gpu_path._nvshmem(bench)
    assert row(bench.report, "checked", "nvshmem")["results"] == 17


def test_mps_is_chosen_for_the_processes_that_are_started_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_path_processes, "_GIVEN_DIRECTORY", str(tmp_path))
    monkeypatch.setenv(MPS_DIRECTORY, "before")
    with processes_with_mps(True):
        assert os.environ[MPS_DIRECTORY] == str(tmp_path)
    assert os.environ[MPS_DIRECTORY] == "before"
    assert not gpu_path_processes.mps_runs()
    (tmp_path / "control").touch()
    assert gpu_path_processes.mps_runs()


def test_what_the_time_leaves_no_room_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_path, "BUDGET_S", -1)
    bench = small_bench()
    for name in ("_one_process", "_processes", "_kills", "_waits"):
        monkeypatch.setattr(gpu_path, name, _named(name))
    gpu_path.measure(bench)
    left = [row["key"] for row in bench.report.rows if row["key"][0] == "left out"]
    assert left == [
        *(["left out", "latency", wire] for wire in latency.wires()),
        ["left out", "between_processes"],
        ["left out", "nvshmem"],
    ]


def test_a_check_that_got_no_answer_fails_and_what_follows_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_path, "_one_process", _named("_one_process", PeerGone("it left")))
    for name in ("_processes", "_kills", "_waits", "_latency", "_between_processes", "_nvshmem"):
        monkeypatch.setattr(gpu_path, name, _named(name))
    report = gpu_path.measure(small_bench())
    assert row(report, "failed", "one_process")["reason"] == "PeerGone: it left"
    assert [(check.name, check.value, check.ok) for check in report.checks] == [
        ("failed_checks", 1, False)
    ]


def _named(name: str, error: Exception | None = None) -> Any:
    def part(*_: Any) -> None:
        if error is not None:
            raise error

    part.__name__ = name
    return part
