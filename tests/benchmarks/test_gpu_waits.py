"""What counts as a wait of the host in a profile, by hand-made traces and a real one of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu_waits import SPAN, calls_of, cuda_calls, waits_in


def event(name: str, ts: float, *, tid: int = 7, cat: str = "cuda_runtime") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": 1.0, "tid": tid}


SPANNED = {**event(SPAN, 10.0, cat="user_annotation"), "dur": 100.0}


def test_calls_of_this_thread_within_the_span_are_counted_by_name() -> None:
    trace = {
        "traceEvents": [
            event("cudaDeviceSynchronize", 5.0),
            SPANNED,
            {**SPANNED, "cat": "gpu_user_annotation"},
            *(event("cudaGraphLaunch_v10000", 20.0 + i) for i in range(3)),
            event("cudaMemcpyAsync", 30.0),
            event("cudaStreamSynchronize", 40.0),
            event("cuMemFree_v2", 41.0, cat="cuda_driver"),
            event("cudaEventSynchronize", 42.0, tid=8),
            event("aten::item", 43.0, cat="cpu_op"),
            event("cudaDeviceSynchronize", 120.0),
            {"ph": "M", "name": "process_name"},
        ]
    }
    calls = cuda_calls(trace, 7)
    assert calls == {
        "cudaGraphLaunch_v10000": 3,
        "cudaMemcpyAsync": 1,
        "cudaStreamSynchronize": 1,
        "cuMemFree_v2": 1,
    }
    assert waits_in(calls) == 2


@pytest.mark.parametrize("events", [[], [SPANNED, SPANNED]], ids=["none", "two"])
def test_a_trace_without_one_span_is_no_evidence(events: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=f"has {len(events)} spans"):
        cuda_calls({"traceEvents": events}, 7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which is called")
def test_a_real_profile_has_the_span_and_a_cpu_calls_no_cuda() -> None:
    x = torch.ones(4)
    seen = []
    assert calls_of(lambda: seen.append(x + 1), 5) == {}
    assert len(seen) == 5
