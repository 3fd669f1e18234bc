"""Times of what runs on a GPU: calls captured in graphs, between two events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Call = Callable[[], object]

REPEATS = 5
"""How often a graph runs through its calls: what a launch costs is shared by many."""


def seconds_per_call(
    variants: Mapping[str, Sequence[Call]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return for each variant the seconds of one of its calls, once for each round.

    Args:
        variants: Calls with inputs that rotate, so that no cache holds the next one's.
        rounds: Each runs all calls of all variants, five times, the variants in turn.
        device: Where they run; on a CPU the times are the host's.
    """
    runs = {name: _captured(calls, device) for name, calls in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    # round -1 warms up
    for number in range(-1, rounds):
        for name, run in runs.items():
            seconds = _timed(run, device)
            if number >= 0:
                times[name].append(seconds / (REPEATS * len(variants[name])))
    return times


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return the bytes per second, read and written together, of a copy; the best of ten."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = seconds_per_call({"copy": [lambda: target.copy_(source)]}, 10, device)
    return 2 * num_bytes / min(times["copy"])


def _captured(calls: Sequence[Call], device: torch.device) -> Call:
    """Return what runs all calls; on a GPU it replays a graph."""

    def eager() -> None:
        for _ in range(REPEATS):
            for call in calls:
                call()

    # compiles, and lets libraries allocate what they keep
    eager()
    if device.type != "cuda":
        return eager
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # threads of clients and servers that have ended may still let go of windows
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        eager()
    return graph.replay


def _timed(run: Call, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    # the GPU idles for about a millisecond, in which the host has time to launch the graph
    torch.cuda._sleep(2_000_000)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def random_bytes(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return random FP8 numbers below 2 without NaN; quickly, for slabs of many gigabytes."""
    values = torch.empty(tuple(shape), dtype=torch.uint8, device=device).random_(0, 256)
    return values.bitwise_and_(0xBF).view(torch.float8_e4m3fn)
