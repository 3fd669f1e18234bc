"""The ops on a device against float64, the twins, and themselves: before anything is measured.

Shape suffixes: G groups, N outputs, K inputs, R packed rows, M rows of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import WrongResult
from torch_eaas import ops
from torch_eaas.ops import ActiveGroups, GemmConfig, grouped_gemm, grouped_gemm_fp8

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OUT_DTYPES = {**DTYPES, "fp8": torch.float32}

ERROR = {"fp32": 1e-5, "fp16": 1e-5, "bf16": 1e-5, "fp8": 5e-4}
"""Of the sum of magnitudes; a tensor core keeps some 13 bits of FP8's products."""

COUNTS = {
    "none": [0] * 5,
    "all": [1] * 7,
    "first only": [65, 0, 0],
    "last only": [0, 0, 64],
    "one has 98 %": [1, 392, 0, 2, 1, 4],
    "around tiles": [0, 1, 63, 64, 65, 127, 128, 129, 300],
    "many": [(g % 7 == 3) * (g % 40) for g in range(1500)],
}
WHOLE = (256, 512)
"""N and K of whole blocks."""

SIZES = {
    "bf16": (WHOLE, (1, 1), (63, 33), (129, 257), (200, 1040)),
    "fp8": (WHOLE, (1, 1), (63, 33), (129, 257), (200, 1040)),
    "fp16": (WHOLE, (63, 33)),
    "fp32": (WHOLE, (63, 33)),
}
"""N and K, also such that TMA cannot read them. Each kind is a kernel to compile, some seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One grouped GEMM on a device."""

    numbers: str
    x: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    counts: Sequence[int]

    def run(
        self,
        block_rows: int = 16,
        config: GemmConfig | None = None,
        rows_R: Tensor | None = None,
        slots_G: Tensor | None = None,
    ) -> Tensor:
        """Run the op."""
        counts_G = torch.tensor(self.counts, dtype=torch.int32, device=self.x[0].device)
        groups = ActiveGroups.of(counts_G, block_rows, slots_G)
        more: dict[str, Any] = {"rows_R": rows_R, "config": config}
        if self.numbers == "fp8":
            x, weights = (self.x[0], self.x[1]), (self.weights[0], self.weights[1])
            return grouped_gemm_fp8(x, weights, groups, out_dtype=torch.float32, **more)
        return grouped_gemm(self.x[0], self.weights[0], groups, **more)

    def exact(self) -> tuple[Tensor, Tensor]:
        """Return each row's sum in float64, and the sum of its magnitudes."""
        x_MK, weights_GNK = self.x[0].double(), self.weights[0].double()
        _, outputs, inputs = weights_GNK.shape
        if self.numbers == "fp8":
            k = torch.arange(inputs, device=x_MK.device) // 128
            n = torch.arange(outputs, device=x_MK.device) // 128
            x_MK = x_MK * self.x[1].double()[:, k]
            weights_GNK = weights_GNK * self.weights[1].double()[:, n][:, :, k]
        parts = torch.split(x_MK, list(self.counts))
        pairs = list(zip(parts, weights_GNK, strict=True))
        return (
            torch.cat([rows @ matrix.t() for rows, matrix in pairs]),
            torch.cat([rows.abs() @ matrix.abs().t() for rows, matrix in pairs]),
        )


def make_problem(
    numbers: str, counts: Sequence[int], outputs: int, inputs: int, device: torch.device
) -> Problem:
    """Return random numbers for these counts, packed; one matrix for each group."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    x_MK = torch.randn(sum(counts), inputs, generator=generator)
    weights_GNK = torch.randn(len(counts), outputs, inputs, generator=generator)
    x: tuple[Tensor, ...] = (x_MK,)
    weights: tuple[Tensor, ...] = (weights_GNK,)
    if numbers == "fp8":
        x = ops.quantize_blocks(x_MK, (1, 128))
        stored = [ops.quantize_blocks(matrix, (128, 128)) for matrix in weights_GNK]
        weights = torch.stack([s[0] for s in stored]), torch.stack([s[1] for s in stored])
    else:
        x, weights = (x_MK.to(DTYPES[numbers]),), (weights_GNK.to(DTYPES[numbers]),)
    return Problem(
        numbers=numbers,
        x=tuple(part.to(device) for part in x),
        weights=tuple(part.to(device) for part in weights),
        counts=counts,
    )


def check_all(device: torch.device, *, quick: bool = False) -> int:
    """Check every op; return how many results were compared.

    Raises:
        WrongResult: One is wrong; the text says which, and by how much.
    """
    compared = 0
    for numbers, sizes in SIZES.items():
        for outputs, inputs in sizes:
            for name, counts in COUNTS.items():
                if quick and name not in ("last only", "all"):
                    continue
                case = make_problem(numbers, counts, outputs, inputs, device)
                compared += _check_gemm(f"{numbers}, {name}, N {outputs}, K {inputs}", case)
        # the twins, which run on a CPU, do not promise it
        if device.type == "cuda" and numbers in ("bf16", "fp8"):
            compared += _check_company(make_problem(numbers, [3, 90, 0, 40], 256, 520, device))
    return compared + _check_others(device)


def same_bits_across_tiles(numbers: str, device: torch.device) -> float:
    """Return the share of results that have the same bits in tiles of 16 and of 128 rows."""
    case = make_problem(numbers, [3, 90, 0, 40], 256, 2048, device)
    return float((case.run(16) == case.run(128)).double().mean())


def check_equal(
    name: str, got: Tensor, expected: Tensor, error: float = 0.0, smallest: float = 0.0
) -> None:
    """Compare; ``error`` is relative, for numbers below ``smallest`` relative to that.

    Raises:
        WrongResult: They differ by more.
    """
    got, expected = got.cpu().double(), expected.cpu().double()
    if got.shape != expected.shape:
        raise WrongResult(f"{name}: shape {tuple(got.shape)}, not {tuple(expected.shape)}")
    bound = error * expected.abs().clamp(min=smallest)
    wrong = ~((got - expected).abs() <= bound) & ~(got == expected)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise WrongResult(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} are wrong, the first at {where}: "
            f"{float(got[where])}, not {float(expected[where])}"
        )


def _check_gemm(name: str, case: Problem) -> int:
    exact_RN, magnitude_RN = case.exact()
    rounding = torch.finfo(OUT_DTYPES[case.numbers]).eps
    bound_RN = rounding * exact_RN.abs() + ERROR[case.numbers] * magnitude_RN + 1e-30
    num_rows, num_groups = len(exact_RN), len(case.counts)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1)).to(exact_RN.device)
    slots = torch.randperm(num_groups, generator=torch.Generator().manual_seed(2)).to(order.device)
    moved = replace(
        case,
        x=tuple(_take(part, order) for part in case.x),
        weights=tuple(_take(part, slots) for part in case.weights),
    )
    rows_R, slots_G = order.argsort().int(), slots.argsort().int()
    is_thorough = case.numbers in ("bf16", "fp8") and case.weights[0].shape[1:] == WHOLE
    tiles = (16, 32, 64, 128, 256) if is_thorough else (16,)
    runs = {f"tiles of {rows}": case.run(rows) for rows in tiles}
    runs["gathered"] = moved.run(16, rows_R=rows_R, slots_G=slots_G)
    if is_thorough:
        runs["split"] = case.run(16, GemmConfig(batch_invariant=False, split_k=4))
    for run, out_RN in runs.items():
        error = ((out_RN.double() - exact_RN).abs() / bound_RN).nan_to_num(nan=1e9)
        if error.numel() and float(error.max()) > 1:
            raise WrongResult(f"{name}, {run}: off by {float(error.max()):.3g} times the bound")
    return len(runs)


def _take(part: Tensor, order: Tensor) -> Tensor:
    # not every torch can index FP8 on every device
    return part.view(torch.uint8)[order].view(part.dtype)


def _check_company(case: Problem) -> int:
    """A row's bits must not depend on its companions."""
    together = {rows: case.run(rows) for rows in (16, 64, 128)}
    for row, group in ((0, 0), (5, 1), (50, 1), (92, 1), (95, 3), (132, 3)):
        counts = [int(g == group) for g in range(len(case.counts))]
        alone = replace(case, x=tuple(part[row : row + 1] for part in case.x), counts=counts)
        for rows, out_RN in together.items():
            name = f"{case.numbers}: row {row} alone and in company, tiles of {rows}"
            check_equal(name, alone.run(rows)[0], out_RN[row])
    return 18


def _other_ops(device: torch.device) -> dict[str, Tensor]:
    """Return what all other ops give, on this device."""
    generator = torch.Generator().manual_seed(3)
    ids_STK = torch.randint(-1, 16, (5, 33, 4), generator=generator).int().to(device)
    x_MK = torch.randn(5 * 33, 200, generator=generator).bfloat16().to(device)
    weights_TK = torch.rand(5 * 33, 4, generator=generator).to(device)
    layers_S = torch.tensor([0, 1, 1, 0, 2], dtype=torch.int32, device=device)
    num_tokens_S = torch.tensor([33, 0, 1, 20, 7], dtype=torch.int32, device=device)
    groups_LE = torch.arange(48, dtype=torch.int32, device=device).view(3, 16)
    rows_R, places_STK, counts_G = ops.pack(ids_STK, layers_S, num_tokens_S, groups_LE, 48)
    found = {"pack, rows": rows_R, "pack, places": places_STK, "pack, counts": counts_G}
    for num_groups in (1, 464, 65_536):
        many_G = torch.randint(-40, 40, (num_groups,), generator=generator).clamp(min=0).int()
        lists = ops.group_shrink(many_G.to(device), 16)
        for name, part in zip(("active", "offsets", "tiles", "totals"), lists, strict=True):
            found[f"group_shrink of {num_groups}, {name}"] = part
    found["quantize_rows"], found["quantize_rows, scales"] = ops.quantize_rows(x_MK)
    stored = (part.to(device) for part in ops.quantize_blocks(x_MK.cpu(), (1, 128)))
    found["dequantize_rows"] = ops.dequantize_rows(*stored, dtype=torch.float32)
    found["swiglu"] = ops.swiglu(x_MK)
    found["swiglu_quantize"], found["swiglu_quantize, scales"] = ops.swiglu_quantize(x_MK)
    packed = x_MK.repeat(4, 1)
    combined = ops.combine_rows(
        packed, places_STK.view(-1, 4), weights_TK, num_tokens_S=num_tokens_S
    )
    found["combine_rows"] = combined.view(5, 33, -1)[3, :20]
    return found


def _check_others(device: torch.device) -> int:
    found, expected = _other_ops(device), _other_ops(torch.device("cpu"))
    for name, result in found.items():
        # one step of FP8 or of bf16, the last digits of fp32, and integers exactly
        error, smallest = {
            torch.float8_e4m3fn: (0.13, 2**-6),
            torch.bfloat16: (2**-7, 0.0),
            torch.float32: (1e-5, 0.0),
            torch.int32: (0.0, 0.0),
        }[result.dtype]
        check_equal(name, result, expected[name], error, smallest)
    return len(found)
