"""How long a request takes on the device path, from the tokens to the sum, against plain copies.

Several requests, one after the other, are one graph: a figure is the graph's time over their
number, so what a launch of the graph costs is shared by them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection as Pipe
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.gpu_clock import seconds_per_call
from benchmarks.gpu_path_checks import PATIENT, Ends
from benchmarks.gpu_path_ends import IdleSlab, Sizes, new_client, transport_for
from benchmarks.gpu_path_processes import start_server
from benchmarks.workers import Worker
from torch_eaas.config import WireDtype
from torch_eaas.device.captured_step import CapturedStep

R1 = Sizes(hidden=7168, intermediate=256, num_experts=16, top_k=8, layers=1)
"""DeepSeek-R1's tokens; experts are few and small, since what is measured is the way to them."""

TOKENS = (1, 4, 16, 64, 128, 256)
REQUESTS = 16
"""Requests of one graph."""
AHEAD = 3
"""Replays that are enqueued before the first of them has ended."""

ALLOWED_S = 120.0
"""How long a process may take for the figures of all sizes."""


def wires() -> list[str]:
    """Return the formats of hidden states that are measured, if this version has them."""
    return [wire for wire in ("bf16", "fp8") if wire in get_args(WireDtype)]


def options_of(wire: str) -> dict[str, Any]:
    """Return a client's options for the shortest way there and back."""
    return {**PATIENT, "wire_dtype": wire, "reply_dtype": "bf16"}


@torch.no_grad()
def graph_seconds(ends: Ends, num_tokens: int, replays: int) -> list[float]:
    """Return a request's seconds within a captured step, one figure for each replay."""
    experts = ends.experts(0)
    given = ends.batch(num_tokens, num_tokens)

    def requests() -> list[Tensor]:
        return [experts(*given) for _ in range(REQUESTS)]

    step = CapturedStep(ends.client, requests)
    step.run()
    times = _replay_seconds(step._captured.replay, replays, ends.device)
    # it raises if any of them failed: then the times are not those of answers
    step.run()
    return [seconds / REQUESTS for seconds in times]


@torch.no_grad()
def eager_seconds(ends: Ends, num_tokens: int, calls: int) -> list[float]:
    """Return the seconds of calls outside of a step: the host launches each stage and waits."""
    experts = ends.experts(0)
    given = ends.batch(num_tokens, num_tokens)
    times = []
    for call in range(-3, calls):
        began = time.perf_counter()
        experts(*given)
        if call >= 0:
            times.append(time.perf_counter() - began)
    return times


def floor_seconds(sizes: Sizes, num_tokens: int, rounds: int, device: torch.device) -> list[float]:
    """Return what two captured copies take, the tokens there and as many rows back, in bf16."""
    shape = (2, num_tokens, sizes.hidden)
    there, back = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))

    def copies() -> None:
        there[1].copy_(there[0])
        back[1].copy_(back[0])

    return seconds_per_call({"copies": [copies]}, rounds, device)["copies"]


def _replay_seconds(
    replay: Callable[[], object], replays: int, device: torch.device
) -> list[float]:
    """Return each replay's seconds; on a GPU they are enqueued ahead, without a gap between.

    Only a few: a launch that finds the GPU's queue full waits within CUDA, and may keep a server of
    this process from launching what the queue waits for.
    """
    if device.type != "cuda":
        return [_seconds(replay) for _ in range(replays)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for number, mark in enumerate(marks[1:]):
        marks[max(0, number - AHEAD)].synchronize()
        replay()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


# -- two processes ---------------------------------------------------------------------------------


def ask(
    pipe: Pipe,
    sizes: Sizes,
    options: dict[str, Any],
    device: str,
    address: str,
    tokens: Sequence[int],
    replays: int,
) -> None:
    """Measure from a client's process; send for each number of tokens the seconds of replays."""
    torch.set_num_threads(1)
    where = torch.device(device)
    config = sizes.config(**options)
    with new_client(
        sizes, config, [address], device=where, transport=transport_for(where)
    ) as client:
        ends = Ends(sizes=sizes, weights={}, device=where, client=client)
        pipe.send({count: graph_seconds(ends, count, replays) for count in tokens})


def seconds_between_processes(
    sizes: Sizes,
    device: torch.device,
    *,
    wire: str,
    tokens: Sequence[int],
    replays: int,
) -> dict[int, list[float]]:
    """Return a request's seconds between two processes on one GPU, by number of tokens."""
    options = options_of(wire)
    with start_server(sizes, options, device, "idle", IdleSlab) as server:
        given = (sizes, options, str(device), server.receive(ALLOWED_S), tokens, replays)
        with Worker(ask, given, cores=sorted(os.sched_getaffinity(0))) as client:
            times: dict[int, list[float]] = client.receive(ALLOWED_S)
    return times
