"""Grouped GEMMs of DeepSeek-R1's size on one GPU, and who else multiplies them.

Shape suffixes: G groups, N outputs, K inputs, R packed rows, k and n blocks of 128.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_clock import Call, random_bytes
from torch_eaas.ops import ActiveGroups, GemmConfig, GemmTuner, grouped_gemm, grouped_gemm_fp8

ROTATIONS = 4
"""Sets of active groups that take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """The matrices of all groups; FP8 has scales, bf16 none."""

    numbers: str
    """fp8 or bf16."""

    values: Tensor
    """``(G, N, K)``."""

    scales: Tensor | None
    """``(G, n, k)`` fp32."""

    @property
    def bytes_per_group(self) -> int:
        """What must be read for each active group."""
        return self.values[0].numel() * self.values.element_size()

    @property
    def weights(self) -> Any:
        """As the GEMM takes them."""
        return self.values if self.scales is None else (self.values, self.scales)


def make_slab(numbers: str, groups: int, outputs: int, inputs: int, device: torch.device) -> Slab:
    """Return random matrices."""
    if numbers == "bf16":
        values = torch.empty(groups, outputs, inputs, dtype=torch.bfloat16, device=device)
        return Slab(numbers=numbers, values=values.normal_(), scales=None)
    scales = torch.rand(groups, -(-outputs // 128), -(-inputs // 128), device=device) + 0.5
    values = random_bytes((groups, outputs, inputs), device)
    return Slab(numbers=numbers, values=values, scales=scales)


def make_rows(numbers: str, rows: int, inputs: int, device: torch.device) -> Any:
    """Return random rows as the GEMM takes them."""
    if numbers == "bf16":
        return torch.randn(rows, inputs, device=device).bfloat16()
    scales = torch.rand(rows, -(-inputs // 128), device=device) + 0.5
    return random_bytes((rows, inputs), device), scales


def spread(num_groups: int, active: int, rows: int, device: torch.device) -> list[Tensor]:
    """Return counts, ``(G,)`` int32, of ``rows`` in ``active`` groups; others in each rotation."""
    found = []
    for turn in range(ROTATIONS):
        order = torch.randperm(num_groups, generator=torch.Generator().manual_seed(active))
        counts_G = torch.zeros(num_groups, dtype=torch.int32)
        counts_G[order.roll(-turn * active)[:active]] = rows
        found.append(counts_G.to(device))
    return found


def gemm(
    x: Any,
    slab: Slab,
    groups: ActiveGroups,
    config: GemmConfig | None = None,
    rows_R: Tensor | None = None,
    gather_div: int = 1,
) -> Tensor:
    """Call the GEMM of the slab's numbers."""
    call: Callable[..., Tensor] = grouped_gemm if slab.scales is None else grouped_gemm_fp8
    return call(x, slab.weights, groups, rows_R=rows_R, gather_div=gather_div, config=config)


def shrink_and_gemm(
    x: Any, slab: Slab, counts_G: Tensor, block_rows: int, config: GemmConfig
) -> Tensor:
    """Make the lists too, as the first GEMM of a layer must."""
    return gemm(x, slab, ActiveGroups.of(counts_G, block_rows), config)


def unshrunk(counts_G: Tensor, block_rows: int) -> ActiveGroups:
    """Return lists that name every group, active or not: a GEMM that looks through all of them."""
    tiles_G = torch.div(counts_G + block_rows - 1, block_rows, rounding_mode="floor")
    totals = (torch.tensor(len(counts_G)), tiles_G.sum().cpu(), counts_G.sum().cpu())
    return ActiveGroups(
        counts_G=counts_G,
        active_G=torch.arange(len(counts_G), dtype=torch.int32, device=counts_G.device),
        offsets_G=(counts_G.cumsum(0) - counts_G).int(),
        tiles_G=(tiles_G.cumsum(0) - tiles_G).int(),
        totals_3=torch.stack(totals).int().to(counts_G.device),
        block_rows=block_rows,
    )


def tuned(x: Any, slab: Slab, groups: ActiveGroups, *, batch_invariant: bool) -> GemmConfig:
    """Return the fastest tiles; where nothing can be measured, the default."""
    if slab.values.device.type != "cuda":
        return GemmConfig(batch_invariant=batch_invariant)
    tuner = GemmTuner(batch_invariant=batch_invariant)
    return tuner.tune(x, slab.weights, groups)


def grouped_mm_calls(x: Tensor, slab: Slab, counts: Sequence[Tensor]) -> list[Call]:
    """Return calls of torch's own grouped product, bf16 only."""
    transposed = slab.values.transpose(1, 2)
    ends = [counts_G.cumsum(0).int() for counts_G in counts]
    return [partial(torch._grouped_mm, x, transposed, offs=ends_G) for ends_G in ends]


class DeepGemm:
    """DeepGEMM's FP8 kernels under the names that its versions gave them.

    Raises:
        ImportError: No module of it is installed, or it has none of the names.
    """

    MASKED = (
        "m_grouped_fp8_gemm_nt_masked",
        "fp8_m_grouped_gemm_nt_masked",
        "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
    )
    CONTIGUOUS = (
        "m_grouped_fp8_gemm_nt_contiguous",
        "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    )
    ALIGNED = ("get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor")

    def __init__(self) -> None:
        self._module = importlib.import_module("deep_gemm")
        self._masked = self._find(self.MASKED)
        self._contiguous = self._find(self.CONTIGUOUS)
        self._aligned = self._find(self.ALIGNED)

    def masked_calls(self, slab: Slab, counts: Sequence[Tensor], rows: int) -> list[Call]:
        """Return calls with room for ``rows`` rows in every group, as that kernel wants it."""
        num_groups, outputs, inputs = slab.values.shape
        device = slab.values.device
        values, scales = make_rows("fp8", num_groups * rows, inputs, device)
        x = values.view(num_groups, rows, inputs), self._aligned(scales.view(num_groups, rows, -1))
        out = torch.empty(num_groups, rows, outputs, dtype=torch.bfloat16, device=device)
        return [partial(self._masked, x, slab.weights, out, counts_G, rows) for counts_G in counts]

    def contiguous_calls(self, slab: Slab, rows: int) -> list[Call]:
        """Return one call with ``rows`` rows, a multiple of 128, in each group."""
        num_groups, outputs, inputs = slab.values.shape
        device = slab.values.device
        values, scales = make_rows("fp8", num_groups * rows, inputs, device)
        indices = torch.arange(num_groups, device=device, dtype=torch.int32).repeat_interleave(rows)
        out = torch.empty(num_groups * rows, outputs, dtype=torch.bfloat16, device=device)
        x = values, self._aligned(scales)
        return [partial(self._contiguous, x, slab.weights, out, indices)]

    def _find(self, names: Sequence[str]) -> Callable[..., Any]:
        for name in names:
            found: Callable[..., Any] | None = getattr(self._module, name, None)
            if found is not None:
                return found
        raise ImportError(f"this deep_gemm has none of {', '.join(names)}")
