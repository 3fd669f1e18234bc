"""Finds a grouped GEMM's fastest tiles by trying them on the GPU, before anything is captured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from torch_eaas.errors import ConfigError
from torch_eaas.ops.active_groups import ActiveGroups
from torch_eaas.ops.gemm import grouped_gemm, grouped_gemm_fp8
from torch_eaas.ops.gemm_config import GemmConfig, candidates, default_config

Numbers = Tensor | tuple[Tensor, Tensor]
"""What ``grouped_gemm`` takes, or values and scales as ``grouped_gemm_fp8`` does."""


class Bucket(NamedTuple):
    """GEMMs that share their tiles; all of it is known to the host."""

    device: torch.device
    dtype: torch.dtype
    outputs: int
    inputs: int
    block_rows: int
    max_rows: int
    """Packed rows, raised to a power of two."""
    max_groups: int
    """Groups, likewise."""


class GemmTuner:
    """Keeps the fastest tiles of each bucket: dtype, N, K, tile rows, and sizes of rows and groups.

    Args:
        batch_invariant: Try only what leaves a row's bits alone; else sums may be cut into parts.
        measure: Returns the time of a call; None: the median of CUDA events, with a cold cache.

    Example:
        ``tuner.tune(x_MK, weights_SNK, groups)`` once, before the capture; then, inside it or not,
        ``grouped_gemm(x_MK, weights_SNK, groups, config=tuner.config(x_MK, weights_SNK, groups))``.
    """

    def __init__(
        self,
        *,
        batch_invariant: bool = True,
        measure: Callable[[Callable[[], object]], float] | None = None,
    ) -> None:
        self.batch_invariant = batch_invariant
        self._measure = measure
        self._found: dict[Bucket, GemmConfig] = {}

    def config(
        self, x: Numbers, weights: Numbers, groups: ActiveGroups, *, rows_R: Tensor | None = None
    ) -> GemmConfig:
        """Return what was found for such a GEMM, else the default. Measures nothing."""
        default = default_config(groups.block_rows)
        return self._found.get(_bucket(x, weights, groups, rows_R), default)

    def tune(
        self,
        x: Numbers,
        weights: Numbers,
        groups: ActiveGroups,
        *,
        rows_R: Tensor | None = None,
        gather_div: int = 1,
    ) -> GemmConfig:
        """Try all tiles on these tensors, unless their bucket has been tuned; return the fastest.

        Waits for the GPU. The counts should be those of a usual batch.

        Raises:
            ConfigError: A CUDA graph is being captured, or the tensors are on no GPU.
        """
        bucket = _bucket(x, weights, groups, rows_R)
        if bucket not in self._found:
            self._check_may_measure(bucket.device)
            times = {
                config: self._time(config, x, weights, groups, rows_R, gather_div)
                for config in candidates(groups.block_rows, batch_invariant=self.batch_invariant)
            }
            self._found[bucket] = min(times, key=lambda config: times[config])
        return self._found[bucket]

    def _check_may_measure(self, device: torch.device) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "tune was called inside a CUDA graph's capture, where nothing can be measured; "
                "call it before, with tensors of the same shapes: config then finds the result"
            )
        if self._measure is None and device.type != "cuda":
            raise ConfigError(f"tune needs tensors on a CUDA GPU, got device {device}")

    def _time(
        self,
        config: GemmConfig,
        x: Numbers,
        weights: Numbers,
        groups: ActiveGroups,
        rows_R: Tensor | None,
        gather_div: int,
    ) -> float:
        def run() -> Tensor:
            if isinstance(x, tuple) and isinstance(weights, tuple):
                return grouped_gemm_fp8(
                    x, weights, groups, rows_R=rows_R, gather_div=gather_div, config=config
                )
            assert isinstance(x, Tensor)
            assert isinstance(weights, Tensor)
            return grouped_gemm(
                x, weights, groups, rows_R=rows_R, gather_div=gather_div, config=config
            )

        measure = self._measure or _median_ms
        try:
            return measure(run)
        except OutOfResources:
            # more shared memory than this GPU has
            return math.inf


def _bucket(x: Numbers, weights: Numbers, groups: ActiveGroups, rows_R: Tensor | None) -> Bucket:
    x_MK = x[0] if isinstance(x, tuple) else x
    weights_SNK = weights[0] if isinstance(weights, tuple) else weights
    num_rows = x_MK.shape[0] if rows_R is None else rows_R.shape[0]
    _, outputs, inputs = weights_SNK.shape
    return Bucket(
        device=x_MK.device,
        dtype=x_MK.dtype,
        outputs=outputs,
        inputs=inputs,
        block_rows=groups.block_rows,
        max_rows=triton.next_power_of_2(num_rows),
        max_groups=triton.next_power_of_2(groups.counts_G.shape[0]),
    )


def _median_ms(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run, warmup=5, rep=20, return_mode="median"))
