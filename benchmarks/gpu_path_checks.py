"""The device path's answers in one process, client and servers on streams of their own.

Each check compares real calls with the local layer, and raises WrongResult at the first that
differs. On a CPU the same runs by the twins, with servers in threads.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_path_ends import (
    TOLERANCE,
    Sizes,
    Weights,
    await_pairs,
    local_layer,
    new_client,
    new_server,
    transport_for,
)
from benchmarks.harness import WrongResult
from torch_eaas.device.captured_step import CapturedStep
from torch_eaas.device.client import DeviceClient
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.device.server import DeviceServer
from torch_eaas.remote_moe import RemoteExperts

# 8 by default: behind a client that waits, in one queue with it, its server would not begin
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

TOKENS = (0, 1, 7, 64, 256)
PATIENT = {"graph_wait": timedelta(seconds=5), "request_timeout": timedelta(seconds=60)}
"""No wait ends early because somebody else has the GPU, or the cores."""

STREAMS = 40
"""Torch has 32 of each priority and then deals out the same ones again."""
CAPTURES = 20
CHANGES_S = 60.0

_NUMBERS = itertools.count()

Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """A client, what it should get, and the servers of this process."""

    sizes: Sizes
    weights: Weights
    device: torch.device
    client: DeviceClient
    servers: Sequence[DeviceServer] = ()

    def experts(self, layer: int) -> RemoteExperts:
        """Return one layer's remote experts."""
        sizes = self.sizes
        return RemoteExperts(
            self.client, layer=layer, num_experts=sizes.num_experts, top_k=sizes.top_k
        )

    def batch(self, num_tokens: int, seed: int) -> Batch:
        """Return a batch on the device."""
        return self.sizes.batch(num_tokens, seed, self.device)

    def check(self, what: str, layer: int, given: Batch, got: Tensor) -> int:
        """Return 1 if the answer is the local layer's; raise WrongResult else."""
        if got.shape != given[0].shape or got.dtype != given[0].dtype:
            raise WrongResult(f"{what}: got {tuple(got.shape)} in {got.dtype}")
        if not len(got):
            return 1
        wanted = local_layer(self.sizes, self.weights, layer, *given)
        error, largest = float((got.double() - wanted).abs().max()), float(wanted.abs().max())
        bound = max(TOLERANCE[self.sizes.storage], TOLERANCE[self.client.config.wire_dtype])
        # written so that NaN is wrong too
        if not error <= bound * largest:
            raise WrongResult(f"{what}: off by {error:.3g}, the largest number is {largest:.3g}")
        return 1


@contextmanager
def in_one_process(
    sizes: Sizes,
    device: torch.device,
    *,
    servers: int = 1,
    slab: type[ExpertSlab] = ExpertSlab,
    others: Sequence[str] = (),
    **options: Any,
) -> Iterator[Ends]:
    """Run servers, each of which holds every expert, and a client of theirs, and of others."""
    weights = sizes.weights()
    transport = transport_for(device)
    config = sizes.config(**{**PATIENT, **options})
    with ExitStack() as stack:
        running = []
        for index in range(servers):
            server = new_server(
                sizes,
                weights,
                config,
                name=f"s{index}",
                device=device,
                transport=transport,
                slab=slab,
            )
            running.append(stack.enter_context(server).serve_in_background())
        addresses = [*(server.address for server in running), *others]
        client = new_client(sizes, config, addresses, device=device, transport=transport)
        await_pairs(stack.enter_context(client), servers)
        yield Ends(sizes=sizes, weights=weights, device=device, client=client, servers=running)


@torch.no_grad()
def check_tokens(ends: Ends) -> int:
    """Compare batches of each size, eager and captured; return how many answers were compared."""
    compared = 0
    experts = [ends.experts(layer) for layer in range(ends.sizes.layers)]
    for num_tokens in (t for t in TOKENS if t <= ends.sizes.max_tokens):
        layer = num_tokens % len(experts)
        given = ends.batch(num_tokens, num_tokens)
        name = f"{num_tokens} tokens, layer {layer}"
        compared += ends.check(f"{name}, eager", layer, given, experts[layer](*given))
        step = CapturedStep(ends.client, _call(experts[layer], given))
        for _ in range(3):
            compared += ends.check(f"{name}, captured", layer, given, step.run())
    return compared


@torch.no_grad()
def check_fewer_tokens(ends: Ends) -> int:
    """Replay one graph for batches of every size up to the one that was captured."""
    compared = 0
    most = ends.sizes.max_tokens
    held = ends.batch(most, 0)
    step = CapturedStep(ends.client, _call(ends.experts(0), held))
    given = [ends.batch(most, 1 + count) for count in (most, 7, 1, 0, most // 2)]
    for count, (x_TD, ids_TK, weights_TK) in zip((most, 7, 1, 0, most // 2), given, strict=True):
        ids_TK[count:] = -1
        for tensor, new in zip(held, (x_TD, ids_TK, weights_TK), strict=True):
            tensor.copy_(new)
        compared += ends.check(f"{count} tokens of a captured {most}", 0, held, step.run())
    return compared


@torch.no_grad()
def check_placements(ends: Ends, rounds: int) -> int:
    """Replay one graph while a layer's experts leave one of their two holders and come back.

    In `exact` mode the bits do not depend on who answers.
    """
    sizes = ends.sizes
    given = ends.batch(min(64, sizes.max_tokens), 1)
    step = CapturedStep(ends.client, _call(ends.experts(0), given))
    first = step.run().clone()
    ends.check("before any change", 0, given, first)
    for number in range(rounds):
        slab = ends.servers[number % len(ends.servers)].experts
        moved = [(0, e) for e in range(sizes.num_experts)]
        for layer, expert in moved:
            slab.remove(layer, expert)
        _check_bits(f"round {number}, experts gone", step.run(), first)
        slab.update({key: ends.weights[key] for key in moved})
        _check_bits(f"round {number}, experts back", step.run(), first)
    return 2 * rounds + 1


@torch.no_grad()
def check_streams(ends: Ends, count: int = STREAMS) -> int:
    """Run one step on more streams than torch has: on none may its waits hold up the server.

    They spin. Were the server's work queued behind them, the step would fail before it is right.
    """
    given = ends.batch(min(7, ends.sizes.max_tokens), 5)
    step = CapturedStep(ends.client, _call(ends.experts(0), given))
    failed = ends.client.counters().get("failed_steps", 0)
    for number in range(count):
        with ExitStack() as stack:
            if ends.device.type == "cuda":
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream(ends.device)))
            ends.check(f"stream {number}", 0, given, step.run())
    failed = ends.client.counters().get("failed_steps", 0) - failed
    if failed:
        raise WrongResult(f"{failed} of {count} steps failed first: streams share a queue")
    return count


@torch.no_grad()
def check_captures_beside_changes(ends: Ends, count: int = CAPTURES) -> int:
    """Capture steps while another thread makes windows and loads experts, as it may at any time."""
    given = ends.batch(min(7, ends.sizes.max_tokens), 6)
    key, slab = (0, 0), ends.servers[0].experts
    transport, is_over = transport_for(ends.device), threading.Event()

    def change() -> int:
        changes = 0
        while not is_over.is_set():
            transport.create_window(1 << 20).close()
            slab.add(*key, ends.weights[key])
            changes += 1
        return changes

    with ThreadPoolExecutor(1) as thread:
        changing = thread.submit(change)
        try:
            for number in range(count):
                step = CapturedStep(ends.client, _call(ends.experts(0), given))
                ends.check(f"capture {number}", 0, given, step.run())
        finally:
            is_over.set()
        if not changing.result(CHANGES_S):
            raise WrongResult("nothing was changed while steps were captured")
    return count


@torch.no_grad()
def check_joins(sizes: Sizes, device: torch.device) -> int:
    """Replay one graph while a second server comes and the first one leaves."""
    late = f"unix:@eaas-late-{os.getpid()}-{next(_NUMBERS)}"
    with in_one_process(sizes, device, others=[late], combine="exact") as ends:
        given = ends.batch(min(64, sizes.max_tokens), 2)
        step = CapturedStep(ends.client, _call(ends.experts(0), given))
        first = step.run().clone()
        compared = ends.check("one server", 0, given, first)
        transport = transport_for(device)
        with new_server(
            *(sizes, ends.weights, ends.client.config),
            name="late",
            device=device,
            transport=transport,
            address=late,
        ) as server:
            server.serve_in_background()
            await_pairs(ends.client, 2)
            _check_bits("a server came", step.run(), first)
            ends.servers[0].close()
            _check_bits("the other left", step.run(), first)
    return compared + 2


def wrong_tokens(got: Tensor, wanted: Tensor) -> int:
    """Return how many rows differ in any bit."""
    return int((got != wanted).any(1).sum()) if got.shape == wanted.shape else len(wanted)


def _check_bits(what: str, got: Tensor, wanted: Tensor) -> None:
    wrong = wrong_tokens(got, wanted)
    if wrong:
        raise WrongResult(f"{what}: {wrong} of {len(wanted)} tokens have other bits")


def _call(experts: RemoteExperts, given: Batch) -> Callable[[], Tensor]:
    return lambda: experts(*given)
