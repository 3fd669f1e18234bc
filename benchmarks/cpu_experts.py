"""A CPU server's experts against transformers' ways of running the same ones, and memory's floor.

One process; all run the same weights with the same routing, which changes with each call, so that
weights come from memory. The floor is the time to read the active experts' weights once, as fast as
a sum over a large tensor is read in the same round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Options, cores, figures, pinned
from benchmarks.layer_calls import DTYPES, Number, Routed, check_equal, inputs, local
from benchmarks.servers import LAYER, QUICK, SEED, Sizes
from torch_eaas.cli.report import Report
from torch_eaas.config import Storage
from torch_eaas.experts import ExpertPool
from torch_eaas.testing import random_experts

CALLS = {1: 10, 4: 4, 16: 2, 64: 1, 256: 1}
"""Tokens to calls of a round."""

THEIRS = ("eager", "grouped_mm", "batched_mm")
BATCHED_UP_TO = 4
"""Tokens up to which ``batched_mm`` is measured: it copies an expert's weights for each row."""

LAYERS = 8
"""Layers of the case in which a server holds many groups, of which ``ACTIVE`` have a row."""

ACTIVE = (1, 2, 4, 8)
MANY_CALLS = 8
READ_NUMBERS = 1 << 26

_Call = Callable[[int, Routed], Tensor]
"""Runs one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What is called in a round, and how a row of it is named."""

    key: tuple[str, ...]
    sizes: Sizes
    number: Number
    num_tokens: int
    calls: int
    layers: int = 1


def run(options: Options) -> Report:
    """Measure with one thread and with two, and add the checks."""
    report = Report(name="cpu_experts")
    threads = torch.get_num_threads()
    try:
        for count, allowed in ((1, cores()[1:]), (2, cores())):
            with pinned(*allowed), torch.no_grad():
                torch.set_num_threads(count)
                _measure_layer(report, options, f"{count} thr")
                _measure_many(report, options, f"{count} thr")
    finally:
        torch.set_num_threads(threads)
    _add_checks(report)
    return report


def _measure_layer(report: Report, options: Options, threads: str) -> None:
    """Add the rows of one layer, for each number format and number of tokens."""
    sizes = QUICK if options.quick else Sizes()
    for number in DTYPES:
        variants = _theirs(number, sizes, 1)
        variants["ours"] = _ours(number, sizes, 1)
        check_equal(number, sizes, {name: _of_layer(call) for name, call in variants.items()})
        if number == "bf16":
            variants["ours_fp8"] = _ours("fp8", sizes, 1)
        for num_tokens, usual in CALLS.items():
            if num_tokens > BATCHED_UP_TO:
                variants.pop("batched_mm", None)
            case = _Case(
                key=(threads, number, f"T{num_tokens}"),
                sizes=sizes,
                number=number,
                num_tokens=num_tokens,
                calls=1 if options.quick else usual,
            )
            _measure(report, options, case, variants)


def _measure_many(report: Report, options: Options, threads: str) -> None:
    """Add the rows of one token that visits few of many groups, in a layer of its own each call."""
    sizes = QUICK if options.quick else Sizes()
    variants = _theirs("bf16", sizes, LAYERS)
    variants["ours"] = _ours("bf16", sizes, LAYERS)
    for active in ACTIVE:
        case = _Case(
            key=(threads, "many", f"A{active}"),
            sizes=replace(sizes, top_k=active),
            number="bf16",
            num_tokens=1,
            calls=1 if options.quick else MANY_CALLS,
            layers=LAYERS,
        )
        _measure(report, options, case, variants)


def _measure(report: Report, options: Options, case: _Case, variants: dict[str, _Call]) -> None:
    """Add a row for each variant, and one for the floor."""
    large = torch.ones(READ_NUMBERS // 64 if options.quick else READ_NUMBERS)
    times: dict[str, list[list[float]]] = {name: [] for name in (*variants, "floor")}
    for turn in range(-1, options.rounds):
        routed = [
            inputs(case.number, case.sizes, case.num_tokens, turn * case.calls + call)
            for call in range(case.calls)
        ]
        found = {name: _round(variant, routed, case.layers) for name, variant in variants.items()}
        started = time.perf_counter()
        large.sum()
        byte_s = (time.perf_counter() - started) / large.nbytes
        found["floor"] = [byte_s * _read_bytes(case, ids_TK) for _, ids_TK, _ in routed]
        # turn -1 warms up
        if turn >= 0:
            for name, round_s in found.items():
                times[name].append(round_s)
    for name, rounds_s in times.items():
        report.add_row(*case.key, name, **figures(rounds_s))


def _round(variant: _Call, routed: Sequence[Routed], layers: int) -> list[float]:
    times = []
    for call, one in enumerate(routed):
        started = time.perf_counter()
        variant(call % layers, one)
        times.append(time.perf_counter() - started)
    return times


def _read_bytes(case: _Case, ids_TK: Tensor) -> int:
    """Return the bytes of the weights of a call's experts."""
    numbers = 3 * case.sizes.hidden * case.sizes.intermediate
    return len(set(ids_TK.flatten().tolist())) * numbers * DTYPES[case.number].itemsize


def _theirs(number: Number, sizes: Sizes, layers: int) -> dict[str, _Call]:
    each = [local(number, sizes, THEIRS) for _ in range(layers)]

    def of(name: str) -> _Call:
        return lambda layer, routed: each[layer][name](routed)

    return {name: of(name) for name in THEIRS}


def _ours(storage: Storage, sizes: Sizes, layers: int) -> _Call:
    """Return a pool as a server runs it, the look-up of groups included."""
    pool = ExpertPool(sizes.hidden, sizes.intermediate, storage=storage)
    weights = random_experts(sizes.hidden, sizes.intermediate, [LAYER], sizes.num_experts, SEED)
    for layer in range(layers):
        pool.update({(layer, expert): given for (_, expert), given in weights.items()})
    table = pool.table

    def call(layer: int, routed: Routed) -> Tensor:
        x_TD, ids_TK, weights_TK = routed
        groups_TK, unknown = table.groups(layer, ids_TK.numpy().astype(np.int32))
        assert not unknown
        groups = torch.from_numpy(groups_TK)
        return pool.run(table, x_TD, groups, weights_TK, per_expert=False).to(x_TD.dtype)

    return call


def _of_layer(call: _Call) -> Callable[[Routed], Tensor]:
    return lambda routed: call(0, routed)


def _add_checks(report: Report) -> None:
    def ratio(above: str, below: str, tokens: str) -> str:
        row = f"rows['1 thr','bf16','{tokens}',"
        return f"{row}'{above}'].p50_us / {row}'{below}'].p50_us"

    for tokens in ("T1", "T4", "T16"):
        report.add_check(f"{tokens}_vs_grouped_mm", ratio("grouped_mm", "ours", tokens), ">= 1.4")
    for tokens in ("T1", "T4"):
        report.add_check(f"{tokens}_vs_floor", ratio("ours", "floor", tokens), "<= 2.2")
    keys = [row["key"] for row in report.rows]
    worst = []
    for case in dict.fromkeys(tuple(key[:-1]) for key in keys):
        names = [name for name in THEIRS if [*case, name] in keys]
        best = ", ".join(f"rows{[*case, name]}.p50_us" for name in names)
        worst.append(f"rows{[*case, 'ours']}.p50_us / min({best})")
    report.add_check("worst_vs_best", f"max({', '.join(worst)})", "<= 1.05")
