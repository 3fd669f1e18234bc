"""The device path's benchmark without a GPU: what it says, and that its parts run, by the twins."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_path
from benchmarks import gpu_path_latency as latency
from benchmarks.gpu_path import SMALL, Bench
from benchmarks.gpu_path_checks import (
    check_captures_beside_changes,
    check_fewer_tokens,
    check_joins,
    check_placements,
    check_streams,
    check_tokens,
    in_one_process,
    wrong_tokens,
)
from benchmarks.gpu_path_ends import QUICK, local_layer
from benchmarks.gpu_path_lanes import (
    check_captures,
    check_eager_micro_batches,
    check_micro_batches,
)
from benchmarks.gpu_path_latency import wires
from benchmarks.harness import WrongResult
from torch_eaas.cli.report import Report
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.errors import PeerGone

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


def test_two_micro_batches_are_under_way_in_one_graph() -> None:
    with in_one_process(QUICK, CPU, max_micro_batches=2) as ends:
        # three layers of each of the two, in each of two replays
        assert check_micro_batches(ends) == 2 * 2 * 3


def test_two_micro_batches_make_a_layers_first_calls() -> None:
    with in_one_process(QUICK, CPU, max_micro_batches=2) as ends:
        assert check_eager_micro_batches(ends) == 2 * 3


def test_threads_capture_at_the_same_time() -> None:
    assert check_captures(CPU, 3) == 9


def test_streams_that_hold_up_their_server_are_told_from_others() -> None:
    with in_one_process(QUICK, CPU) as ends:
        assert check_streams(ends, 2) == 2
        numbers = iter([0, 1])
        ends.client.counters = lambda: {"failed_steps": next(numbers)}  # type: ignore[method-assign]
        with pytest.raises(WrongResult, match="1 of 2 steps failed first: streams share a queue"):
            check_streams(ends, 2)


def test_steps_are_captured_while_windows_are_made_and_experts_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with in_one_process(QUICK, CPU) as ends:
        assert check_captures_beside_changes(ends, 2) == 2

        def fail(*_: Any) -> None:
            raise RuntimeError("CUDA error: planned")

        monkeypatch.setattr(ends.servers[0].experts, "add", fail)
        with pytest.raises(RuntimeError, match="CUDA error: planned"):
            check_captures_beside_changes(ends, 2)


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


def test_a_request_is_the_graphs_time_over_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "REQUESTS", 4)
    monkeypatch.setattr(latency, "_seconds", lambda run: (run(), 12.0)[1])
    with in_one_process(QUICK, CPU) as ends:
        assert latency.graph_seconds(ends, 1, 2) == [3.0, 3.0]


def test_targets_follow_from_the_rows() -> None:
    report = Report(name="gpu_path")
    report.add_row("parts", failed=1)
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
        "failed_parts": (1, False),
        "wrong_tokens": (0, True),
        "waits_in_replays": (0, True),
        "waits_per_step": (1, True),
        "graph_1_token_us": (11, True),
        "graph_64_tokens_vs_floor": (2, False),
        "mps_1_token_us": (13, False),
    }


def test_what_the_time_leaves_no_room_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_path, "BUDGET_S", -1)
    report = gpu_path.measure(small_bench())
    assert [row["key"] for row in report.rows] == [
        *(["left out", name] for name in ("one_process", "processes", "kills", "waits")),
        *(["left out", "latency", wire] for wire in latency.wires()),
        *(["left out", name] for name in ("between_processes", "nvshmem")),
        ["parts"],
    ]
    assert report.rows[0]["reason"] == "-1 s were over"


def test_a_part_that_got_no_answer_fails_and_what_follows_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_path, "_one_process", _named("_one_process", PeerGone("it left")))
    for name in ("_processes", "_kills", "_waits", "_latency", "_between_processes", "_nvshmem"):
        monkeypatch.setattr(gpu_path, name, _named(name))
    report = gpu_path.measure(small_bench())
    assert row(report, "failed", "one_process")["reason"] == "PeerGone: it left"
    assert f"gpu_path: nvshmem ended after {row(report, 'until', 'nvshmem')['seconds']} s" in (
        capsys.readouterr().err
    )
    assert [(check.name, check.value, check.ok) for check in report.checks] == [
        ("failed_parts", 1, False)
    ]


def _named(name: str, error: Exception | None = None) -> Any:
    def part(*_: Any) -> None:
        if error is not None:
            raise error

    part.__name__ = name
    return part


class Queue:
    """A GPU's events and replays: notes how many replays were enqueued and not waited for."""

    def __init__(self) -> None:
        self.enqueued, self.ended, self.most = 0, 0, 0

    def replay(self) -> None:
        self.enqueued += 1
        self.most = max(self.most, self.enqueued - self.ended)

    def event(self, **_: Any) -> Queue.Event:
        return Queue.Event(self)

    class Event:
        def __init__(self, queue: Queue) -> None:
            self.queue, self.at = queue, 0

        def record(self) -> None:
            self.at = self.queue.enqueued

        def synchronize(self) -> None:
            self.queue.ended = max(self.queue.ended, self.at)

        def elapsed_time(self, other: Queue.Event) -> float:
            return 2000.0 * (other.at - self.at)


def test_a_gpus_queue_never_gets_full_of_replays_and_never_runs_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "Event", queue.event)
    times = latency._replay_seconds(queue.replay, 20, torch.device("cuda"))
    assert times == [2.0] * 20
    assert (queue.enqueued, queue.ended) == (20, 20)
    assert queue.most == latency.AHEAD + 1
