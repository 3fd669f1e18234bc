"""Run one benchmark: ``python -m benchmarks NAME --json FILE``."""

import sys

from benchmarks.harness import Case, main

CASES = (
    Case(
        name="transport",
        summary="round trips over shared memory, against a C loop, Pipe, gloo and zmq",
        module="benchmarks.transport",
        tests=("tests/protocol", "tests/comm", "tests/test_server_pairs.py"),
    ),
    Case(
        name="layer",
        summary="a layer with remote experts, against the same layer with local ones",
        module="benchmarks.layer",
        tests=("tests/ops", "tests/test_experts.py", "tests/test_client*.py"),
    ),
    Case(
        name="dbo",
        summary="micro-batches that overlap, against the same ones after each other",
        module="benchmarks.dbo",
        tests=("tests/test_dbo*.py", "tests/test_turns.py", "tests/test_client*.py"),
    ),
    Case(
        name="cpu_experts",
        summary="a CPU server's experts, against transformers' ways and the read bandwidth",
        module="benchmarks.cpu_experts",
        tests=("tests/ops", "tests/test_experts.py"),
    ),
    Case(
        name="failover",
        summary="right answers while servers, clients and the monitor are killed and stopped",
        module="benchmarks.failover",
        tests=(
            "tests/test_faults.py",
            "tests/test_silence.py",
            "tests/test_client*.py",
            "tests/test_server*.py",
            "tests/benchmarks/test_chaos.py",
            "tests/benchmarks/test_schedule.py",
        ),
    ),
    Case(
        name="gpu_ops",
        summary="the kernels on a GPU, against float64, memory's speed and other kernels",
        module="benchmarks.gpu_ops",
        tests=(),
    ),
    Case(
        name="gpu_path",
        summary="requests by kernels on a GPU: answers, kills, and latency against plain copies",
        module="benchmarks.gpu_path",
        tests=(),
    ),
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
