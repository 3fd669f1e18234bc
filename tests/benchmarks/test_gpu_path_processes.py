"""Processes of gpu_path without a GPU: kills over shared memory, and who runs with MPS."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_path, gpu_path_nvshmem, gpu_path_processes
from benchmarks import gpu_path_latency as latency
from benchmarks.gpu_path import SMALL
from benchmarks.gpu_path_ends import QUICK
from benchmarks.gpu_path_processes import (
    MPS_DIRECTORY,
    QUICK_DEEP,
    check_kills,
    processes_with_mps,
)
from benchmarks.workers import Worker
from tests.benchmarks.test_gpu_path import CPU, row, small_bench
from torch_eaas.errors import PeerGone, TransportError


def test_servers_killed_between_replays_and_within_one_cost_no_bit() -> None:
    sizes = replace(QUICK_DEEP, storage="fp32", dtype=torch.float32)
    found = check_kills(sizes, CPU, num_tokens=4, wait=SMALL.wait)
    assert found.wrong_tokens == 0
    assert min(found.usual_s, found.between_s, found.within_s) > 0


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
        assert reason == "PeerGone: worker 7 ended with -11"
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
    reason = row(bench.report, "left out", "two PEs")["reason"]
    assert reason == "TransportError: server: ConfigError: no NVSHMEM here"
    monkeypatch.setattr(gpu_path, "answers_between_pes", lambda *_: 17)
    gpu_path._nvshmem(bench)
    assert row(bench.report, "checked", "nvshmem")["results"] == 17


def tell_directory(pipe: Connection) -> None:
    """Send what CUDA would look at."""
    pipe.send(os.environ.get(MPS_DIRECTORY))


def test_processes_that_start_after_others_have_the_environment_of_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for directory in ("first", "second"):
        monkeypatch.setenv(MPS_DIRECTORY, directory)
        with Worker(tell_directory, (), cores=sorted(os.sched_getaffinity(0))) as worker:
            assert worker.receive() == directory


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
