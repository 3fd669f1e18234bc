"""What the host waited for while it replayed: CUDA's own calls, as ``torch.profiler`` saw them."""

from __future__ import annotations

import json
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

SPAN = "gpu_path: replays"

WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemset",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
)
"""Calls that return only when the device has done something, or that may allocate or stall it."""

ALLOCATES = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cuMemAlloc", "cuMemFree")


def calls_of(replay: Callable[[], object], times: int) -> Counter[str]:
    """Replay so often under the profiler; return CUDA's calls of this thread meanwhile, by name."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    # the profiler ends last: it waits for the device; torch 2.11 warns unless events accumulate
    with profile(activities=activities, acc_events=True) as found, record_function(SPAN):
        for _ in range(times):
            replay()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return cuda_calls(trace, threading.get_native_id())


def cuda_calls(trace: Mapping[str, Any], thread: int) -> Counter[str]:
    """Return the CUDA calls that a thread made within the span, by name.

    The profiler waits for the device itself, before the span and behind it; a server's thread may
    wait at any time.

    Raises:
        ValueError: The trace has no such span, or several.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    spans = [e for e in events if e["name"] == SPAN and e.get("cat") == "user_annotation"]
    if len(spans) != 1:
        raise ValueError(f"the trace has {len(spans)} spans {SPAN!r}, not one")
    begin = spans[0]["ts"]
    end = begin + spans[0]["dur"]
    return Counter(
        event["name"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and event["tid"] == thread
        and begin <= event["ts"] <= end
    )


def waits_in(calls: Mapping[str, int]) -> int:
    """Return how many of the calls made the host wait, or the device stall for an allocation."""
    return sum(count for name, count in calls.items() if _base(name) in (*WAITS, *ALLOCATES))


def _base(name: str) -> str:
    """Return a call's name without the suffix of its version, as in ``cudaMemcpy_v3020``."""
    return name.split("_")[0]
