"""A MoE layer over one server against the same layer with transformers' local experts.

The client has one core, the server the other; local experts run on the client's. One thread each,
the same weights and the same routing for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from benchmarks.harness import Options, cores, figures, pinned
from benchmarks.servers import LAYER, QUICK, SEED, Sizes, routing, serve_pool
from benchmarks.workers import Worker
from torch_eaas.cli.report import Report
from torch_eaas.client import Client
from torch_eaas.remote_moe import RemoteExperts, RemoteMoE
from torch_eaas.testing import random_experts

Number = Literal["bf16", "fp32"]
Routed = tuple[Tensor, Tensor, Tensor]
"""Tokens ``(T, D)``, expert ids and weights, both ``(T, K)``."""

DTYPES: dict[Number, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
CALLS = {1: 20, 8: 5, 64: 2, 256: 1}
"""Tokens to calls of a round."""

TOLERANCE: dict[Number, float] = {"bf16": 0.1, "fp32": 1e-4}
LOCAL = ("eager", "grouped_mm")
PARTS = ("experts_us", "wait_us", "bookkeeping_us")


def measure(report: Report, options: Options) -> None:
    """Add a row for each number format, number of tokens and variant."""
    sizes = QUICK if options.quick else Sizes()
    client_core, server_core = cores()
    for number in DTYPES:
        if options.quick and number != "bf16":
            continue
        with (
            pinned(client_core),
            Worker(serve_pool, (sizes, 0, 1, number), cores=[server_core]) as worker,
            sizes.client([worker.receive()], wire_dtype=number) as client,
        ):
            _measure(report, options, number, sizes, client)


def _measure(
    report: Report, options: Options, number: Number, sizes: Sizes, client: Client
) -> None:
    variants: dict[str, Callable[[Routed], Tensor]] = local(number, sizes, LOCAL)
    variants["remote"] = _remote(sizes, client)
    with torch.no_grad():
        check_equal(number, sizes, variants)
        for num_tokens, usual in CALLS.items():
            calls = 1 if options.quick else usual
            times: dict[str, list[list[float]]] = {name: [] for name in variants}
            parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
            for round_number in range(-1, options.rounds):
                routed = [
                    inputs(number, sizes, num_tokens, round_number * calls + call)
                    for call in range(calls)
                ]
                before = client.counters()
                for name, variant in variants.items():
                    round_s = _round(variant, routed)
                    # round -1 warms up
                    if round_number >= 0:
                        times[name].append(round_s)
                if round_number >= 0:
                    after = client.counters()
                    for part in PARTS:
                        parts[part] += (after[part] - before[part]) / (calls * options.rounds)
            for name in variants:
                more = {n: round(v, 1) for n, v in parts.items()} if name == "remote" else {}
                report.add_row(number, f"T{num_tokens}", name, **figures(times[name]), **more)


def _round(variant: Callable[[Routed], Tensor], calls: list[Routed]) -> list[float]:
    times = []
    for routed in calls:
        start = time.perf_counter()
        variant(routed)
        times.append(time.perf_counter() - start)
    return times


def inputs(number: Number, sizes: Sizes, num_tokens: int, seed: int) -> Routed:
    """Return random tokens and their routing."""
    generator = torch.Generator().manual_seed(seed + (1 << 20))
    x_TD = torch.randn(num_tokens, sizes.hidden, generator=generator).to(DTYPES[number])
    return (x_TD, *routing(sizes, num_tokens, seed + (1 << 20)))


def _remote(sizes: Sizes, client: Client) -> Callable[[Routed], Tensor]:
    experts = RemoteExperts(client, layer=LAYER, num_experts=sizes.num_experts, top_k=sizes.top_k)
    routed_now: list[Tensor] = []
    layer = RemoteMoE(lambda x_TD: (routed_now[0], routed_now[1]), experts)

    def call(routed: Routed) -> Tensor:
        x_TD, *routed_now[:] = routed
        out: Tensor = layer(x_TD)
        return out

    return call


def local(
    number: Number, sizes: Sizes, names: Sequence[str]
) -> dict[str, Callable[[Routed], Tensor]]:
    """Return transformers' own experts module with the served weights, once for each way."""
    from transformers import DeepseekV3Config  # optional, and slow to import
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    weights = random_experts(sizes.hidden, sizes.intermediate, [LAYER], sizes.num_experts, SEED)
    ordered = [weights[LAYER, expert] for expert in range(sizes.num_experts)]
    dtype = DTYPES[number]
    gate_up = torch.stack([torch.cat([w.gate_ID, w.up_ID]) for w in ordered]).to(dtype)
    down = torch.stack([w.down_DI for w in ordered]).to(dtype)
    variants: dict[str, Callable[[Routed], Tensor]] = {}
    for name in names:
        config = DeepseekV3Config(
            hidden_size=sizes.hidden,
            moe_intermediate_size=sizes.intermediate,
            n_routed_experts=sizes.num_experts,
            num_experts_per_tok=sizes.top_k,
        )
        config._experts_implementation = name
        with torch.device("meta"):
            experts = DeepseekV3Experts(config)
        experts.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
        variants[name] = _spread(experts)
    return variants


def _spread(experts: Callable[..., Tensor]) -> Callable[[Routed], Tensor]:
    return lambda routed: experts(*routed)


def check_equal(
    number: Number, sizes: Sizes, variants: dict[str, Callable[[Routed], Tensor]]
) -> None:
    """Fail unless all give what ``eager`` gives."""
    routed = inputs(number, sizes, 3, -1)
    outputs = {name: variant(routed) for name, variant in variants.items()}
    for name, out in outputs.items():
        bound = TOLERANCE[number]
        torch.testing.assert_close(out, outputs["eager"], rtol=bound, atol=bound, msg=name)
