"""The GPU benchmark without a GPU: what it says, and that each part runs, at small sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_checks, gpu_clock, gpu_ops
from benchmarks.gpu_ops import QUICK, Bench, measure
from benchmarks.harness import WrongResult
from torch_eaas.cli.report import Report

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> Bench:
    made = Bench(device=CPU, rounds=1, shapes=QUICK)
    measure(made, quick=True)
    return made


def keys(report: Report) -> set[tuple[str, ...]]:
    return {tuple(row["key"]) for row in report.rows}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu_ops", "--json", str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.strip() == (
        f"gpu_ops needs a CUDA GPU, and torch {torch.__version__} sees none here; "
        "nothing was checked and nothing measured"
    )
    assert not target.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.timeout(600)
def test_on_a_gpu_every_op_is_right() -> None:
    assert gpu_checks.check_all(torch.device("cuda")) > 100


def test_every_part_has_its_rows(bench: Bench) -> None:
    found = keys(bench.report)
    ours = ("gemm", "shrink+gemm", "without shrink", "floor")
    assert {("decode", "fp8", "down", "A2", "R3", name) for name in ours} <= found
    assert {("decode", "bf16", "gate_up", "A2", "R1", n) for n in (*ours, "grouped_mm")} <= found
    assert {("few", "fp8", "down", "A1", name) for name in ("invariant", "free", "floor")} <= found
    assert ("dense", "fp8", "gate_up", "R128", "gemm") in found
    assert {("gather or copy", "bf16", "dense R128", "gate_up", n) for n in ("gather", "copy")} <= (
        found
    )
    assert {("shrink", "G464", "ours"), ("shrink", "G65536", "ours"), ("copy",)} <= found
    assert not any(key[0] == "left out" for key in found)


def test_targets_follow_from_the_rows(bench: Bench) -> None:
    report = Report(name="gpu_ops", rows=list(bench.report.rows))
    for name in ("gate_up", "down"):
        report.rows = [row for row in report.rows if "deep_gemm" not in row["key"]]
        report.add_row("dense", "fp8", name, "R128", "deep_gemm", p50_us=0.0)
    gpu_ops._add_checks(Bench(device=CPU, rounds=1, shapes=QUICK, report=report))
    checks = {check.name: check for check in report.checks}
    assert set(checks) == {"shrink_65536_us", "decode_vs_floor", "dense_vs_deep_gemm"}
    assert (checks["dense_vs_deep_gemm"].value, checks["dense_vs_deep_gemm"].ok) == (0.0, False)


def test_the_floor_is_the_active_matrices_over_the_copys_speed(bench: Bench) -> None:
    rows = {tuple(row["key"]): row for row in bench.report.rows}
    floor_us = rows["decode", "fp8", "gate_up", "A2", "R1", "floor"]["p50_us"]
    assert floor_us == pytest.approx(2 * 256 * 128 / bench.bandwidth * 1e6, abs=0.01)


def test_what_the_time_leaves_no_room_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ops, "BUDGET_S", -1)
    monkeypatch.setattr(gpu_checks, "check_all", lambda device, quick: 0)
    report = measure(Bench(device=CPU, rounds=1, shapes=QUICK), quick=True)
    left_out = [row for row in report.rows if row["key"][0] == "left out"]
    assert len(left_out) == 7
    assert left_out[1]["key"] == ["left out", "decode", "fp8", "gate_up", "256", "128"]
    assert {row["reason"] for row in left_out} == {"-1 s were over"}


def test_a_kernel_that_is_not_there_or_fails_is_named_once() -> None:
    bench = Bench(device=CPU, rounds=1, shapes=QUICK)

    def fail() -> None:
        raise RuntimeError("not for this GPU")

    for _ in range(2):
        assert bench.foreign("theirs", lambda: [fail]) == {}
    assert bench.report.rows == [
        {"key": ["without", "theirs"], "reason": "RuntimeError: not for this GPU"}
    ]


def test_a_wrong_product_is_seen_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = gpu_checks.grouped_gemm

    def wrong(x_MK: Tensor, *args: Any, **more: Any) -> Tensor:
        out_RN = right(x_MK, *args, **more)
        if x_MK.dtype == torch.bfloat16 and len(out_RN):
            out_RN[-1, -1] *= 1.02
        return out_RN

    monkeypatch.setattr(gpu_checks, "grouped_gemm", wrong)
    with pytest.raises(
        WrongResult, match=r"bf16, all, N 256, K 512, tiles of 16: off by \S+ times"
    ):
        measure(Bench(device=CPU, rounds=1, shapes=QUICK), quick=True)


def test_times_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_clock, "_timed", lambda run, device: (run(), 60.0)[1])
    called: list[str] = []
    calls = {"a": [lambda: called.append("a")] * 3, "b": [lambda: called.append("b")]}
    assert gpu_clock.seconds_per_call(calls, 2, CPU) == {"a": [4.0, 4.0], "b": [12.0, 12.0]}
    # a first run that compiles, one that warms up, and two rounds, in turn
    assert "".join(called) == "a" * 15 + "b" * 5 + ("a" * 15 + "b" * 5) * 3


def test_random_fp8_numbers_are_finite_small_and_of_both_signs() -> None:
    numbers = gpu_clock.random_bytes((100, 100), CPU).float()
    assert numbers.isfinite().all()
    assert (float(numbers.min()), float(numbers.max())) == (-1.875, 1.875)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ([1.0, 3.0], r"it: 1 of 2 are wrong, the first at \(1,\): 3.0, not 2.0"),
        ([1.0, float("nan")], r"it: 1 of 2 are wrong, the first at \(1,\): nan, not 2.0"),
        ([1.0], r"it: shape \(1,\), not \(2,\)"),
    ],
)
def test_what_differs_is_named(got: list[float], message: str) -> None:
    with pytest.raises(WrongResult, match=message):
        gpu_checks.check_equal("it", torch.tensor(got), torch.tensor([1.0, 2.0]), 0.1)
