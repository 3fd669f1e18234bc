"""The kernels on one GPU: right first, then how fast beside the memory's speed and other kernels.

Everything is replayed from CUDA graphs. Inputs rotate: each call's active groups are others than
the last one's, so their matrices come from memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks import gpu_checks
from benchmarks.gpu_clock import Call, copy_bandwidth, seconds_per_call
from benchmarks.gpu_gemms import (
    DeepGemm,
    Slab,
    gemm,
    grouped_mm_calls,
    make_rows,
    make_slab,
    shrink_and_gemm,
    spread,
    tuned,
    unshrunk,
)
from benchmarks.harness import CannotMeasure, Options, figures
from torch_eaas.cli.report import Report
from torch_eaas.ops import ActiveGroups, choose_block_rows, group_shrink

BUDGET_S = 360
"""No part begins after so many seconds; what is left out is said in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What is measured; the defaults are DeepSeek-R1's."""

    groups: int = 464
    dense_groups: int = 32
    matrices: tuple[tuple[str, int, int], ...] = (("gate_up", 4096, 7168), ("down", 7168, 2048))
    """Name, N, K."""
    active: tuple[int, ...] = (8, 16, 32)
    rows: tuple[int, ...] = (1, 8, 32)
    few: tuple[int, ...] = (1, 2, 4)
    """Active groups too few to fill the GPU."""
    dense_rows: tuple[int, ...] = (128, 512)
    copy_bytes: int = 2**31


QUICK = Shapes(
    groups=16,
    dense_groups=2,
    matrices=(("gate_up", 256, 128), ("down", 128, 256)),
    active=(2,),
    rows=(1, 3),
    few=(1,),
    dense_rows=(128,),
    copy_bytes=2**20,
)


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run: where, how long, and what was found."""

    device: torch.device
    rounds: int
    shapes: Shapes
    report: Report = field(default_factory=lambda: Report(name="gpu_ops"))
    bandwidth: float = 0.0

    def add(self, *key: str, calls: Mapping[str, Sequence[Call]], floor_bytes: int = 0) -> None:
        """Add a row for each variant, and one for the time that memory needs at least."""
        times = seconds_per_call(calls, self.rounds, self.device)
        for name, seconds in times.items():
            self.report.add_row(*key, name, **figures([[s] for s in seconds]))
        if floor_bytes:
            floor_us = round(floor_bytes / self.bandwidth * 1e6, 2)
            self.report.add_row(*key, "floor", p50_us=floor_us, megabytes=floor_bytes // 2**20)

    def foreign(self, name: str, make: Callable[[], list[Call]]) -> dict[str, Sequence[Call]]:
        """Return others' calls by their name, or nothing, with the reason in the report."""
        try:
            calls = make()
            calls[0]()
        except Exception as error:
            # it is not installed, or not for this GPU, and each fails in its own way
            if not self.report.has_rows(("without", name)):
                self.report.add_row(
                    "without", name, reason=f"{type(error).__name__}: {error}"[:200]
                )
            return {}
        return {name: calls}


def run(options: Options) -> Report:
    """Check, then measure.

    Raises:
        CannotMeasure: There is no GPU.
        WrongResult: An op gave what it must not; nothing is measured then.
    """
    if not torch.cuda.is_available():
        raise CannotMeasure(
            f"gpu_ops needs a CUDA GPU, and torch {torch.__version__} sees none here; "
            "nothing was checked and nothing measured"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = QUICK if options.quick else Shapes()
    bench = Bench(device=device, rounds=options.rounds, shapes=shapes)
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    bench.report.add_row("device", name=name, capability=f"{major}.{minor}")
    return measure(bench, quick=options.quick)


def measure(bench: Bench, *, quick: bool) -> Report:
    """Run all parts, as far as the time goes."""
    began = time.monotonic()
    compared = gpu_checks.check_all(bench.device, quick=quick)
    bench.report.add_row("checked", results=compared, seconds=round(time.monotonic() - began, 1))
    for numbers in ("bf16", "fp8"):
        share = gpu_checks.same_bits_across_tiles(numbers, bench.device)
        bench.report.add_row("same bits in tiles of 16 and 128 rows", numbers, share=share)
    bench.bandwidth = copy_bandwidth(bench.device, bench.shapes.copy_bytes)
    bench.report.add_row("copy", gigabytes_per_s=round(bench.bandwidth / 1e9, 1))
    parts = [partial(_shrink, bench)]
    parts += [partial(_decode, bench, "fp8", *matrix) for matrix in bench.shapes.matrices]
    parts += [partial(_dense, bench, "fp8", *matrix) for matrix in bench.shapes.matrices]
    parts += [partial(_decode, bench, "bf16", *bench.shapes.matrices[0])]
    parts += [partial(_dense, bench, "bf16", *bench.shapes.matrices[0])]
    for part in parts:
        _run_part(bench, part, may_begin=time.monotonic() - began < BUDGET_S)
    if not quick:
        _add_checks(bench)
    return bench.report


def _run_part(bench: Bench, part: partial[None], *, may_begin: bool) -> None:
    reason = "" if may_begin else f"{BUDGET_S} s were over"
    try:
        if may_begin:
            part()
    except torch.OutOfMemoryError as error:
        reason = str(error)[:200]
    if reason:
        name = part.func.__name__.strip("_")
        bench.report.add_row("left out", name, *map(str, part.args[1:]), reason=reason)
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def _shrink(bench: Bench) -> None:
    for num_groups in (464, 65_536):
        lists = spread(num_groups, num_groups // 16, 3, bench.device)
        calls = [partial(group_shrink, counts_G, 16) for counts_G in lists]
        bench.add("shrink", f"G{num_groups}", calls={"ours": calls})


def _decode(bench: Bench, numbers: str, name: str, outputs: int, inputs: int) -> None:
    """Few active groups of many; buffers have room for the largest batch, as a server's do."""
    shapes = bench.shapes
    slab = make_slab(numbers, shapes.groups, outputs, inputs, bench.device)
    max_rows = max(shapes.active) * max(shapes.rows)
    x = make_rows(numbers, max_rows, inputs, bench.device)
    block_rows = choose_block_rows(max_rows, shapes.groups)
    usual = spread(shapes.groups, shapes.active[-1] // 2, shapes.rows[1], bench.device)[0]
    config = tuned(x, slab, ActiveGroups.of(usual, block_rows), batch_invariant=True)
    for active in shapes.active:
        for rows in shapes.rows:
            counts = spread(shapes.groups, active, rows, bench.device)
            lists = [ActiveGroups.of(counts_G, block_rows) for counts_G in counts]
            walks = [unshrunk(counts_G, block_rows) for counts_G in counts]
            calls: dict[str, Sequence[Call]] = {
                "gemm": [partial(gemm, x, slab, groups, config) for groups in lists],
                "shrink+gemm": [
                    partial(shrink_and_gemm, x, slab, counts_G, block_rows, config)
                    for counts_G in counts
                ],
                "without shrink": [partial(gemm, x, slab, groups, config) for groups in walks],
            }
            calls |= _others(bench, x, slab, counts, rows)
            key = ("decode", numbers, name, f"A{active}", f"R{rows}")
            bench.add(*key, calls=calls, floor_bytes=active * slab.bytes_per_group)
    _gather(bench, "decode", x, slab, ActiveGroups.of(usual, block_rows), name)
    _few(bench, x, slab, block_rows, name)


def _others(
    bench: Bench, x: object, slab: Slab, counts: Sequence[torch.Tensor], rows: int
) -> dict[str, Sequence[Call]]:
    """Return who else can multiply these."""
    if isinstance(x, torch.Tensor):
        return bench.foreign("grouped_mm", lambda: grouped_mm_calls(x, slab, counts))
    return bench.foreign("deep_gemm", lambda: DeepGemm().masked_calls(slab, counts, rows))


def _few(bench: Bench, x: object, slab: Slab, block_rows: int, name: str) -> None:
    """What batch-invariance costs where a GEMM has fewer tiles than the GPU has room for."""
    for active in bench.shapes.few:
        counts = spread(bench.shapes.groups, active, 1, bench.device)
        lists = [ActiveGroups.of(counts_G, block_rows) for counts_G in counts]
        calls = {}
        for variant, is_invariant in (("invariant", True), ("free", False)):
            config = tuned(x, slab, lists[0], batch_invariant=is_invariant)
            calls[variant] = [partial(gemm, x, slab, groups, config) for groups in lists]
        key = ("few", slab.numbers, name, f"A{active}")
        bench.add(*key, calls=calls, floor_bytes=active * slab.bytes_per_group)


def _dense(bench: Bench, numbers: str, name: str, outputs: int, inputs: int) -> None:
    """All groups active, whole tiles."""
    num_groups = bench.shapes.dense_groups
    slab = make_slab(numbers, num_groups, outputs, inputs, bench.device)
    for rows in bench.shapes.dense_rows:
        x = make_rows(numbers, num_groups * rows, inputs, bench.device)
        block_rows = choose_block_rows(num_groups * rows, num_groups)
        counts = spread(num_groups, num_groups, rows, bench.device)[:1]
        groups = ActiveGroups.of(counts[0], block_rows)
        config = tuned(x, slab, groups, batch_invariant=True)
        calls: dict[str, Sequence[Call]] = {"gemm": [partial(gemm, x, slab, groups, config)]}
        if isinstance(x, torch.Tensor):
            make = partial(grouped_mm_calls, x, slab, counts)
            calls |= bench.foreign("grouped_mm", make)
        else:
            make = partial(_contiguous_calls, slab, rows)
            calls |= bench.foreign("deep_gemm", make)
        bench.add("dense", numbers, name, f"R{rows}", calls=calls)
        _gather(bench, f"dense R{rows}", x, slab, groups, name)


def _contiguous_calls(slab: Slab, rows: int) -> list[Call]:
    return DeepGemm().contiguous_calls(slab, rows)


def _gather(
    bench: Bench, case: str, x: object, slab: Slab, groups: ActiveGroups, name: str
) -> None:
    """The GEMM reads each row where it is, or rows are copied together first."""
    parts = [x] if isinstance(x, torch.Tensor) else list(x)  # type: ignore[call-overload]
    num_rows = int(groups.totals_3[2])
    rows_R = torch.randperm(len(parts[0]), device=bench.device).int()
    config = tuned(x, slab, groups, batch_invariant=True)

    def copy() -> object:
        # only rows that there are; a server does not know how many, and would copy more
        packed = [_take(part, rows_R[:num_rows]) for part in parts]
        return gemm(packed[0] if len(packed) == 1 else tuple(packed), slab, groups, config)

    calls: dict[str, Sequence[Call]] = {
        "gather": [partial(gemm, x, slab, groups, config, rows_R)],
        "copy": [copy],
    }
    bench.add("gather or copy", slab.numbers, case, name, calls=calls)


def _take(part: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    # index_select knows no FP8
    return part.view(torch.uint8).index_select(0, rows_R).view(part.dtype)


def _add_checks(bench: Bench) -> None:
    """Add the targets of what was measured."""
    report, shapes = bench.report, bench.shapes
    report.add_check("shrink_65536_us", "rows['shrink','G65536','ours'].p50_us", "<= 10")
    keys = [tuple(row["key"]) for row in report.rows]
    decode = [key[:-1] for key in keys if key[:2] == ("decode", "fp8") and key[-1] == "floor"]
    dense = [key[:-1] for key in keys if key[:2] == ("dense", "fp8") and key[-1] == "gemm"]
    sparse = [key for key in decode if int(key[3][1:]) < shapes.groups / 10]
    for name, cases, above, below, target in (
        ("decode_vs_floor", decode, "floor", "gemm", ">= 0.8"),
        ("decode_vs_deep_gemm", decode, "deep_gemm", "shrink+gemm", ">= 1"),
        ("sparse_vs_deep_gemm", sparse, "deep_gemm", "shrink+gemm", ">= 2"),
        ("dense_vs_deep_gemm", dense, "deep_gemm", "gemm", ">= 0.7"),
    ):
        ratios = [
            f"rows[{', '.join(map(repr, (*key, above)))}].p50_us"
            f" / rows[{', '.join(map(repr, (*key, below)))}].p50_us"
            for key in cases
            if report.has_rows((*key, above), (*key, below))
        ]
        if ratios:
            formula = ratios[0] if len(ratios) == 1 else f"min({', '.join(ratios)})"
            report.add_check(name, formula, target)
