"""The carried checkpoint, plain and overlapped, with real servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_eaas
from benchmarks.harness import Options
from benchmarks.servers import PATIENT, serve_experts
from benchmarks.workers import Worker
from torch_eaas.cli.report import Report, median
from torch_eaas.client import Client
from torch_eaas.config import ClientConfig
from torch_eaas.dbo import DoubleBatchOverlap
from torch_eaas.experts import ExpertPool
from torch_eaas.models.checkpoint import Checkpoint
from torch_eaas.models.load import load_client
from torch_eaas.models.moe import read_experts, read_shape
from torch_eaas.placement import share

CHECKPOINT = Path(torch_eaas.__file__).parent / "assets" / "shakespeare"
NUM_SERVERS = 2
NUM_ROWS = 16
NEW_TOKENS = 24
PROMPT = b"ROMEO:\nBut soft, what light through yonder window breaks?\n"


def serve_checkpoint(pipe: Pipe, index: int, count: int) -> None:
    """Serve a share of the carried checkpoint's experts."""
    with Checkpoint(CHECKPOINT) as checkpoint:
        shape = read_shape(checkpoint)
        pool = ExpertPool(shape.hidden_size, shape.intermediate_size, storage="fp32")
        held = share(shape.moe_layers, shape.num_experts, index, count)
        for layer, experts in held.items():
            for expert, weights in read_experts(checkpoint, layer, experts, storage="fp32"):
                pool.add(layer, expert, weights)
    serve_experts(pipe, pool, index)


def measure(report: Report, options: Options, client_core: int, server_core: int) -> None:
    """Add a row: 16 rows at once, and two micro-batches of 8, plain and overlapped."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(serve_checkpoint, (i, NUM_SERVERS), cores=[server_core]))
            for i in range(NUM_SERVERS)
        ]
        with Checkpoint(CHECKPOINT) as checkpoint:
            shape = read_shape(checkpoint)
        config = ClientConfig(hidden_size=shape.hidden_size, top_k=shape.top_k, **PATIENT)
        client = stack.enter_context(Client(config, servers=[w.receive() for w in workers]))
        client.wait_ready(shape.moe_layers, shape.num_experts)
        times, num_other = _measure(client, options.rounds)
    report.add_row(
        "carried",
        "N2",
        whole_ms=round(1000 * median(times["whole"]), 1),
        halves_ms=round(1000 * median(times["halves"]), 1),
        overlap_ms=round(1000 * median(times["overlap"]), 1),
        speedup_of_halves=round(median(times["halves"]) / median(times["overlap"]), 3),
        speedup_of_whole=round(median(times["whole"]) / median(times["overlap"]), 3),
        rows=NUM_ROWS,
        new_tokens=NEW_TOKENS,
        other_tokens=num_other,
        client_core=client_core,
        server_core=server_core,
    )


def _measure(client: Client, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Return each way's seconds, and how many tokens a split or overlap has changed."""
    # a mixin's method, of which the type of the model knows nothing
    model: Any = load_client(CHECKPOINT, client)
    prompts = torch.tensor([list(PROMPT[i : i + 32]) for i in range(NUM_ROWS)])

    def generate(ids: Tensor) -> Tensor:
        found: Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return found

    overlap = DoubleBatchOverlap(client, num_micro_batches=2)
    ways: dict[str, Callable[[], Tensor]] = {
        "whole": lambda: generate(prompts),
        "halves": lambda: torch.cat([generate(half) for half in prompts.chunk(2)]),
        "overlap": lambda: overlap(generate, prompts),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    num_other = 0
    for number in range(-1, rounds):
        texts = {}
        for name, way in ways.items():
            start = time.perf_counter()
            texts[name] = way()
            # round -1 warms up
            if number >= 0:
                times[name].append(time.perf_counter() - start)
        # sums of other batches round otherwise, so that a near tie may be decided otherwise
        num_other += sum(int((text != texts["whole"]).sum()) for text in texts.values())
    return times, num_other
