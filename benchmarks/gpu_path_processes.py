"""Servers in processes of their own on the same GPU, and what becomes of a step when one is killed.

The step is a stub of a deep model: each layer keeps what it sees at the step's own position, as
attention keeps its KV, and adds what its remote experts answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_path_checks import PATIENT, Ends, wrong_tokens
from benchmarks.gpu_path_ends import Sizes, await_pairs, new_client, new_server, transport_for
from benchmarks.harness import WrongResult
from benchmarks.workers import Worker
from torch_eaas.device.captured_step import CapturedStep
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.ops.pair_table import pair_row
from torch_eaas.protocol.layout import PairSpec

DEEP = Sizes(hidden=256, intermediate=128, num_experts=4, top_k=2, layers=60, max_tokens=64)
QUICK_DEEP = Sizes(hidden=32, intermediate=16, num_experts=4, top_k=2, layers=5, max_tokens=8)

MPS_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
"""Where CUDA looks for MPS's daemon; where there is none, a process runs without it."""

_NO_MPS = "/nonexistent/no-mps"
_GIVEN_DIRECTORY = os.environ.get(MPS_DIRECTORY, "/tmp/nvidia-mps")

STARTS_S = 120.0
"""How long a process may take to import, compile and capture."""


def mps_runs() -> bool:
    """Return whether MPS's daemon is there."""
    return Path(_GIVEN_DIRECTORY, "control").exists()


@contextmanager
def processes_with_mps(with_mps: bool) -> Iterator[None]:
    """Let this process, if it has not touched CUDA yet, and those it starts use MPS or not."""
    before = os.environ.get(MPS_DIRECTORY)
    os.environ[MPS_DIRECTORY] = _GIVEN_DIRECTORY if with_mps else _NO_MPS
    try:
        yield
    finally:
        if before is None:
            del os.environ[MPS_DIRECTORY]
        else:
            os.environ[MPS_DIRECTORY] = before


def serve(
    pipe: Pipe,
    sizes: Sizes,
    options: dict[str, Any],
    device: str,
    name: str,
    slab: type[ExpertSlab],
) -> None:
    """Serve every expert until the pipe ends; send the control address first."""
    torch.set_num_threads(1)
    where = torch.device(device)
    server = new_server(
        sizes,
        sizes.weights(),
        sizes.config(**options),
        name=name,
        device=where,
        transport=transport_for(where),
        slab=slab,
    )
    with server:
        server.serve_in_background()
        pipe.send(server.address)
        try:
            pipe.recv()
        except EOFError:
            pass


def start_server(
    sizes: Sizes,
    options: dict[str, Any],
    device: torch.device,
    name: str,
    slab: type[ExpertSlab] = ExpertSlab,
) -> Worker:
    """Start a server's process; its address is what it sends first."""
    given = (sizes, options, str(device), name, slab)
    return Worker(serve, given, cores=sorted(os.sched_getaffinity(0)))


def serve_until_a_fault(pipe: Pipe, sizes: Sizes, device: str) -> None:
    """Serve in the process's own thread, and let the device read where there is no memory."""
    config, where = sizes.config(**PATIENT), torch.device(device)
    transport = transport_for(where)
    given = {"name": "faulty", "device": where, "transport": transport}
    server = new_server(sizes, sizes.weights(), config, **given)  # type: ignore[arg-type]
    nowhere = pair_row(PairSpec.of(config), requests=1 << 20, replies=1 << 20, instance=1, epoch=1)
    server._path._iteration.tables.pairs_PC[0] = torch.tensor(nowhere)  # type: ignore[attr-defined]
    pipe.send(server.address)
    server.serve()


@contextmanager
def in_processes(
    sizes: Sizes, device: torch.device, *, servers: int, **options: Any
) -> Iterator[tuple[Ends, list[Worker]]]:
    """Run servers in processes of their own, each with all experts, and a client here."""
    options = {**PATIENT, **options}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(start_server(sizes, options, device, f"s{index}"))
            for index in range(servers)
        ]
        addresses = [worker.receive(STARTS_S) for worker in workers]
        client = new_client(
            sizes,
            sizes.config(**options),
            addresses,
            device=device,
            transport=transport_for(device),
        )
        await_pairs(stack.enter_context(client), servers)
        ends = Ends(sizes=sizes, weights=sizes.weights(), device=device, client=client)
        yield ends, workers


class Deep:
    """The launches of a deep model's step, and what it keeps.

    Args:
        ends: The client.
        num_tokens: T.
    """

    def __init__(self, ends: Ends, num_tokens: int) -> None:
        sizes = ends.sizes
        self._experts = [ends.experts(layer) for layer in range(sizes.layers)]
        self._given = ends.batch(num_tokens, 3)
        shape = (sizes.layers, num_tokens, sizes.hidden)
        self.kept_LTD = torch.zeros(shape, dtype=sizes.dtype, device=ends.device)

    def __call__(self) -> Tensor:
        """Run every layer."""
        x_TD, ids_TK, weights_TK = self._given
        for layer, experts in enumerate(self._experts):
            self.kept_LTD[layer] = x_TD
            x_TD = experts.combine(experts.dispatch(x_TD, ids_TK, weights_TK), add=x_TD)
            # so that no number grows with the depth
            x_TD = x_TD / 2
        return x_TD


@dataclass(frozen=True, slots=True)
class Killed:
    """What two kills cost."""

    between_s: float
    """A step after a server was killed between two replays."""
    within_s: float
    """A step within which a server was killed."""
    usual_s: float
    """A step without a failure."""
    wrong_tokens: int
    """Tokens whose bits differ from the undisturbed step's, in the output or in what is kept."""
    failed_steps: int
    """Replays that failed."""


@torch.no_grad()
def check_kills(
    sizes: Sizes, device: torch.device, *, num_tokens: int, wait: timedelta = timedelta(seconds=0.5)
) -> Killed:
    """Kill one of three servers between two replays, and the next within one; `exact` mode.

    Raises:
        WrongResult: A bit of the output, or of what the layers keep, is another than before.
    """
    options = {"combine": "exact", "graph_wait": wait}
    with in_processes(sizes, device, servers=3, **options) as (ends, workers):
        model = Deep(ends, num_tokens)
        step = CapturedStep(ends.client, model)
        wanted_TD, kept_LTD = step.run().clone(), model.kept_LTD.clone()
        usual_s = min(_seconds(step) for _ in range(3))
        wrong = 0
        workers[0].kill()
        model.kept_LTD.zero_()
        between_s = _seconds(step)
        wrong += _wrong(step, model, wanted_TD, kept_LTD)
        model.kept_LTD.zero_()
        killer = threading.Timer(usual_s / 2, workers[1].kill)
        killer.start()
        within_s = _seconds(step)
        killer.join(STARTS_S)
        wrong += _wrong(step, model, wanted_TD, kept_LTD)
        # the last one answers alone, with the same bits
        step.run()
        wrong += _wrong(step, model, wanted_TD, kept_LTD)
        failed = ends.client.counters().get("failed_steps", 0)
    if wrong:
        raise WrongResult(f"after kills {wrong} tokens have other bits than the undisturbed step's")
    return Killed(between_s, within_s, usual_s, wrong, failed)


def _seconds(step: CapturedStep[Tensor]) -> float:
    began = time.perf_counter()
    step.run()
    return time.perf_counter() - began


def _wrong(step: CapturedStep[Tensor], model: Deep, wanted_TD: Tensor, kept_LTD: Tensor) -> int:
    """Return how many tokens differ; ``run`` has waited for them."""
    got_TD = step._captured.outputs
    kept = wrong_tokens(model.kept_LTD.flatten(0, 1), kept_LTD.flatten(0, 1))
    return wrong_tokens(got_TD, wanted_TD) + kept
