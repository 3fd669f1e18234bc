"""Grouped GEMMs to try: numbers in each format, run by the kernel and by the twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_eaas.ops import gemm_kernel
from torch_eaas.ops.active_groups import ActiveGroups
from torch_eaas.ops.gemm_config import GemmConfig
from torch_eaas.ops.quantize import quantize_blocks
from torch_eaas.ops.reference import grouped_gemm_fp8_ref, grouped_gemm_ref

# the interpreter cuts a sum off where a GPU rounds it to bf16 or fp16: one unit of the last place
TOLERANCE = {
    "fp32": {"rtol": 1e-5, "atol": 1e-4},
    "fp16": {"rtol": 2**-9, "atol": 1e-4},
    "bf16": {"rtol": 2**-7, "atol": 1e-4},
    "fp8": {"rtol": 1e-5, "atol": 1e-4},
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SMALL = GemmConfig(block_n=64)


@dataclass(frozen=True)
class Problem:
    """One grouped GEMM. fp8 gives fp32, the others their own format."""

    number: str
    x: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    counts: tuple[int, ...]
    rows_R: Tensor | None = None
    gather_div: int = 1
    slots: tuple[int, ...] | None = None

    def kernel(
        self, block_rows: int = 16, config: GemmConfig = SMALL, *, may_describe: bool = True
    ) -> Tensor:
        """Run the kernel, in the interpreter."""
        groups = ActiveGroups.of(self._int32(self.counts), block_rows, self._slots())
        tiles = [config.block_n, config.stages, config.warps, config.programs, config.split_k]
        scales = (self.x[1], self.weights[1]) if self.number == "fp8" else None
        return gemm_kernel.launch(
            self.x[0],
            self.weights[0],
            self.rows_R,
            groups.slots_G,
            *groups[:5],
            self.gather_div,
            block_rows,
            tiles,
            scales=scales,
            out_dtype=torch.float32 if scales else None,
            may_describe=may_describe,
        )

    def twin(self) -> Tensor:
        """Run the twin."""
        counts_G, slots_G = self._int32(self.counts), self._slots()
        more = {"rows_R": self.rows_R, "gather_div": self.gather_div, "slots_G": slots_G}
        if self.number == "fp8":
            return grouped_gemm_fp8_ref(self.x, self.weights, counts_G, **more)  # type: ignore[arg-type]
        return grouped_gemm_ref(*self.x, *self.weights, counts_G, **more)  # type: ignore[arg-type]

    def check(self, out_RN: Tensor) -> None:
        """Compare the rows that belong to a group with the twin's."""
        num_rows = sum(self.counts)
        torch.testing.assert_close(
            out_RN[:num_rows], self.twin()[:num_rows], equal_nan=True, **TOLERANCE[self.number]
        )

    def gathered(self, order: Sequence[int], gather_div: int) -> Problem:
        """Let packed row i be row ``order[i] // gather_div``."""
        return replace(self, rows_R=self._int32(order), gather_div=gather_div)

    def _slots(self) -> Tensor | None:
        return None if self.slots is None else self._int32(self.slots)

    @staticmethod
    def _int32(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32)


def problem(number: str, counts: Sequence[int], outputs: int, inputs: int) -> Problem:
    """Return random numbers for these counts, packed, one slot for each group."""
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    x_MK = torch.randn(sum(counts), inputs, generator=generator)
    weights_SNK = torch.randn(len(counts), outputs, inputs, generator=generator)
    if number != "fp8":
        dtype = DTYPES[number]
        return Problem(number, (x_MK.to(dtype),), (weights_SNK.to(dtype),), tuple(counts))
    # each block its own size, so that a wrong scale shows
    x_MK *= torch.logspace(-1, 1, inputs)
    weights_SNK *= torch.logspace(-1, 1, outputs)[:, None]
    parts = [quantize_blocks(weight_NK, (128, 128)) for weight_NK in weights_SNK]
    blocks = (0, -(-outputs // 128), -(-inputs // 128))
    weights = (
        torch.stack([p[0] for p in parts]) if parts else weights_SNK.to(torch.float8_e4m3fn),
        torch.stack([p[1] for p in parts]) if parts else torch.empty(blocks),
    )
    return Problem(number, quantize_blocks(x_MK, (1, 128)), weights, tuple(counts))
