"""The device path on a real GPU, in one process and in several: answers, not times.

They run without MPS: it ends all of its clients together when one is killed.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_path import PROFILED
from benchmarks.gpu_path_checks import (
    check_captures_beside_changes,
    check_fewer_tokens,
    check_joins,
    check_placements,
    check_streams,
    check_tokens,
    in_one_process,
)
from benchmarks.gpu_path_ends import Sizes
from benchmarks.gpu_path_lanes import (
    check_captures,
    check_eager_micro_batches,
    check_micro_batches,
)
from benchmarks.gpu_path_latency import wires
from benchmarks.gpu_path_nvshmem import answers_between_pes
from benchmarks.gpu_path_processes import (
    DEEP,
    STARTS_S,
    check_kills,
    in_processes,
    serve_until_a_fault,
)
from benchmarks.gpu_waits import calls_of, waits_in
from benchmarks.workers import Worker
from torch_eaas.device.captured_step import CapturedStep, check_repeatable
from torch_eaas.errors import PeerGone, TransportError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]

GPU = torch.device("cuda", 0)
SIZES = Sizes()


@pytest.mark.parametrize("wire", wires())
@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_two_streams_of_one_process_give_the_local_layers_answers(wire: str, storage: str) -> None:
    sizes = replace(SIZES, storage=storage)
    with in_one_process(sizes, GPU, wire_dtype=wire) as ends:
        assert check_tokens(ends) + check_fewer_tokens(ends) > 20


def test_two_processes_over_cuda_ipc_give_the_local_layers_answers() -> None:
    with in_processes(SIZES, GPU, servers=1) as (ends, _):
        assert check_tokens(ends) + check_fewer_tokens(ends) > 20


def test_one_graph_is_replayed_while_experts_move() -> None:
    with in_one_process(SIZES, GPU, servers=2, combine="exact") as ends:
        check_placements(ends, 10)
        assert ends.client.counters()["failed_steps"] > 0


def test_no_stream_of_a_client_holds_up_a_server_of_its_process() -> None:
    with in_one_process(SIZES, GPU) as ends:
        assert check_streams(ends) > 32


def test_steps_are_captured_while_other_threads_make_windows_and_load_experts() -> None:
    with in_one_process(SIZES, GPU) as ends:
        assert check_captures_beside_changes(ends) > 0


def test_a_fault_of_the_device_ends_its_server_at_once_and_not_well() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with Worker(serve_until_a_fault, (SIZES, str(GPU)), cores=cores) as worker:
        worker.receive(STARTS_S)
        began = time.monotonic()
        with pytest.raises(PeerGone, match=r"ended with (?!0$|None)"):
            worker.receive(60)
        assert time.monotonic() - began < 20


def test_two_micro_batches_on_forked_streams_are_one_graph() -> None:
    with in_one_process(SIZES, GPU, max_micro_batches=2) as ends:
        assert check_micro_batches(ends) == 2 * 2 * 3


def test_a_layers_first_calls_by_two_streams_at_once_see_the_same_tables() -> None:
    with in_one_process(SIZES, GPU, max_micro_batches=2) as ends:
        assert check_eager_micro_batches(ends) == 2 * 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_all_work_of_an_end_is_its_gpus_also_if_that_is_not_the_current_one() -> None:
    other = torch.device("cuda", 1)
    with in_one_process(SIZES, GPU) as ends:
        check_fewer_tokens(ends)
    # the same captures anew, and tables that are written often
    with in_one_process(SIZES, other, servers=2, combine="exact") as ends:
        assert check_fewer_tokens(ends) == 5
        check_placements(ends, 5)


def test_threads_capture_at_the_same_time() -> None:
    assert check_captures(GPU, 10) == 30


def test_a_server_comes_and_the_other_leaves_under_one_graph() -> None:
    assert check_joins(SIZES, GPU) == 3


def test_servers_killed_between_replays_and_within_one_cost_no_bit_of_60_layers() -> None:
    found = check_kills(DEEP, GPU, num_tokens=16)
    assert found.wrong_tokens == 0
    # one wait for each of the two, not one a layer
    assert found.failed_steps <= 4


@torch.no_grad()
def test_replays_call_nothing_that_waits_and_a_step_is_repeatable() -> None:
    with in_one_process(SIZES, GPU) as ends:
        given = ends.batch(64, 1)
        experts = ends.experts(0)
        step = CapturedStep(ends.client, lambda: experts(*given))
        check_repeatable(step, {"x": given[0]})
        calls = calls_of(step._captured.replay, PROFILED)
        assert waits_in(calls) == 0, calls
        assert sum(count for name, count in calls.items() if "GraphLaunch" in name) == PROFILED
        assert waits_in(calls_of(step.run, PROFILED)) <= PROFILED


def test_two_pes_of_nvshmem_on_one_gpu_give_the_local_layers_answers() -> None:
    try:
        compared = answers_between_pes(SIZES, GPU)
    except TransportError as error:
        pytest.skip(f"NVSHMEM does not start two PEs on this GPU: {error}")
    assert compared > 20
