"""One server's experts: the weights of some (layer, expert) pairs, and nothing else.

Shape legend: T tokens, K experts per token, R = T * K rows, G groups held, D hidden,
I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torch_eaas.config import Storage, check_at_least, check_choice
from torch_eaas.errors import ConfigError
from torch_eaas.ops.grouped_linear import grouped_linear
from torch_eaas.ops.quantize import dequantize_blocks, quantize_blocks
from torch_eaas.ops.reference import (
    combine_ref,
    group_shrink_ref,
    pack_ref,
    swiglu_ref,
)
from torch_eaas.placement import holdings_from

_NOTHING_HELD = np.full(1, -1, dtype=np.int64)

STORAGE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The three matrices of one SwiGLU expert.

    Args:
        gate_ID: ``(I, D)``.
        up_ID: ``(I, D)``.
        down_DI: ``(D, I)``.
        scales: Block scales of the three, fp32; given exactly when they are float8_e4m3fn.
        block: Rows and columns that share one scale.
    """

    gate_ID: Tensor
    up_ID: Tensor
    down_DI: Tensor
    scales: tuple[Tensor, Tensor, Tensor] | None = None
    block: tuple[int, int] = (128, 128)

    def dequantized(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate, up and down as plain numbers."""
        matrices = (self.gate_ID, self.up_ID, self.down_DI)
        if self.scales is None:
            return matrices
        gate, up, down = (
            dequantize_blocks(matrix, scale, self.block)
            for matrix, scale in zip(matrices, self.scales, strict=True)
        )
        return gate, up, down

    def quantized(self) -> ExpertWeights:
        """Return the same expert with FP8 weights and block scales."""
        if self.scales is not None:
            return self
        gate, up, down = (
            quantize_blocks(matrix.float(), self.block)
            for matrix in (self.gate_ID, self.up_ID, self.down_DI)
        )
        return ExpertWeights(gate[0], up[0], down[0], (gate[1], up[1], down[1]), self.block)


class _Expert:
    """One expert as it is kept: gate and up fused, or FP8 with its scales."""

    def __init__(self, weights: ExpertWeights, storage: Storage) -> None:
        self._fp8 = weights.quantized() if storage == "fp8" else None
        self._plain: tuple[Tensor, Tensor] | None = None
        if self._fp8 is None:
            dtype = STORAGE_DTYPES[storage]
            gate_ID, up_ID, down_DI = weights.dequantized()
            gate_up = torch.cat([gate_ID, up_ID]).to(dtype).contiguous()
            self._plain = (gate_up, down_DI.to(dtype, copy=True).contiguous())

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return gate and up stacked ``(2 I, D)``, and down ``(D, I)``, ready to multiply."""
        if self._plain is not None:
            return self._plain
        assert self._fp8 is not None
        gate_ID, up_ID, down_DI = self._fp8.dequantized()
        return torch.cat([gate_ID, up_ID]), down_DI


class ExpertPool(nn.Module):
    """The experts that one server holds; experts may come and go while it runs.

    Changes replace whole tables, so a batch under way keeps the experts that it began with; only
    one thread may change the pool at a time.

    Args:
        hidden_size: D.
        intermediate_size: I.
        storage: How weights are kept. ``fp8`` saves memory, not time: each use dequantizes.
        deterministic: In ``exact`` mode, a row's bits do not depend on the rows that share its
            batch.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        storage: Storage = "fp32",
        deterministic: bool = True,
    ) -> None:
        super().__init__()
        check_at_least("hidden_size", hidden_size, 1)
        check_at_least("intermediate_size", intermediate_size, 1)
        check_choice("storage", storage, Storage)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.storage = storage
        self.deterministic = deterministic
        self._fast_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        self._experts: dict[tuple[int, int], _Expert] = {}
        self.table = GroupTable({})

    @property
    def holdings(self) -> dict[int, tuple[int, ...]]:
        """Layer to the sorted ids of the experts held there."""
        return holdings_from(self._experts)

    def add(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """Hold one more expert, or replace the one that is held.

        Raises:
            ConfigError: A matrix has another shape than the pool's experts, or scales are missing.
        """
        self.update({(layer, expert): weights})

    @torch.no_grad()
    def update(self, experts: Mapping[tuple[int, int], ExpertWeights]) -> None:
        """Hold more experts, in one step."""
        new = {}
        for (layer, expert), weights in experts.items():
            check_at_least("layer", layer, 0)
            check_at_least("expert", expert, 0)
            self._check(layer, expert, weights)
            new[layer, expert] = _Expert(weights, self.storage)
        self._replace({**self._experts, **new})

    def remove(self, layer: int, expert: int) -> None:
        """Hold an expert no more; ConfigError if it is not held."""
        if (layer, expert) not in self._experts:
            raise ConfigError(f"layer {layer}, expert {expert} is not held")
        self._replace({key: e for key, e in self._experts.items() if key != (layer, expert)})

    def forward(
        self, x_TD: Tensor, groups_TK: Tensor, weights_TK: Tensor, *, per_expert: bool = False
    ) -> Tensor:
        """Run the tokens through their experts and weight the results.

        Args:
            x_TD: Hidden states, ``(T, D)``.
            groups_TK: Groups of ``table``, ``(T, K)`` int64; -1 contributes nothing.
            weights_TK: Final router weights, ``(T, K)`` fp32.
            per_expert: Return one row per (token, expert), not their sum.

        Returns:
            fp32, ``(T, D)`` or ``(T, K, D)``.
        """
        return self.run(self.table, x_TD, groups_TK, weights_TK, per_expert=per_expert)

    @torch.no_grad()
    def run(
        self,
        table: GroupTable,
        x_TD: Tensor,
        groups_TK: Tensor,
        weights_TK: Tensor,
        *,
        per_expert: bool,
    ) -> Tensor:
        """Like ``forward``, with groups that were looked up in ``table``."""
        order_R, counts_G = pack_ref(groups_TK.reshape(-1), table.num_groups)
        active_G, num_active = group_shrink_ref(counts_G)
        active = active_G[: int(num_active)].tolist()
        counts = counts_G[active].tolist()
        num_rows = sum(counts)
        tokens_N = order_R[:num_rows] // groups_TK.shape[1]
        dtype = self._compute_dtype(counts, per_expert)
        rows_ND = x_TD.to(dtype).index_select(0, tokens_N)
        matrices = [table.experts[group].matrices() for group in active]
        # only then are rows compared bit by bit: a sum per token depends on its companions anyway
        fixed = self.deterministic and per_expert
        gate_up = grouped_linear(rows_ND, [m[0] for m in matrices], counts, deterministic=fixed)
        down = grouped_linear(
            swiglu_ref(gate_up), [m[1] for m in matrices], counts, deterministic=fixed
        )
        return combine_ref(
            down.view(num_rows, self.hidden_size), order_R, weights_TK, per_expert=per_expert
        )

    def _compute_dtype(self, counts: Sequence[int], per_expert: bool) -> torch.dtype:
        """Return the dtype to multiply in: bf16 only where this CPU is fast at it."""
        if self.storage != "bf16":
            return torch.float32
        # one or two rows are bound by reading the weights, in any dtype
        narrow = not per_expert and max(counts, default=0) <= 2
        return torch.bfloat16 if self._fast_bf16 or narrow else torch.float32

    def _check(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        wanted = (self.intermediate_size, self.hidden_size)
        scales = weights.scales or (None, None, None)
        for name, matrix, scale, shape in (
            ("gate", weights.gate_ID, scales[0], wanted),
            ("up", weights.up_ID, scales[1], wanted),
            ("down", weights.down_DI, scales[2], wanted[::-1]),
        ):
            if tuple(matrix.shape) != shape:
                raise ConfigError(
                    f"layer {layer}, expert {expert}: {name} must be {shape}, "
                    f"got {tuple(matrix.shape)}"
                )
            if (matrix.dtype == torch.float8_e4m3fn) != (scale is not None):
                raise ConfigError(
                    f"layer {layer}, expert {expert}: block scales belong to float8_e4m3fn "
                    f"weights and to no others, got {name} of {matrix.dtype}"
                )
            grid = tuple(-(-n // b) for n, b in zip(shape, weights.block, strict=True))
            if scale is not None and tuple(scale.shape) != grid:
                raise ConfigError(
                    f"layer {layer}, expert {expert}: scales of {name} must be {grid} for blocks "
                    f"of {weights.block}, got {tuple(scale.shape)}"
                )

    def _replace(self, experts: dict[tuple[int, int], _Expert]) -> None:
        self._experts = experts
        self.table = GroupTable(experts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertPool:
        raise ConfigError(
            "an ExpertPool keeps the dtype and device that it was made with; make a new pool"
        )


class GroupTable:
    """The groups of one moment: (layer, expert) to group number, and back to the weights."""

    def __init__(self, experts: Mapping[tuple[int, int], _Expert]) -> None:
        keys = sorted(experts)
        self.experts = [experts[key] for key in keys]
        self.num_groups = len(keys)
        sizes: dict[int, int] = {}
        for layer, expert in keys:
            sizes[layer] = max(sizes.get(layer, 0), expert + 1)
        # the last entry is -1: it serves the id -1, and every id beyond the held ones
        self._layers = {
            layer: np.full(size + 1, -1, dtype=np.int64) for layer, size in sizes.items()
        }
        for group, (layer, expert) in enumerate(keys):
            self._layers[layer][expert] = group

    def groups(self, layer: int, ids_TK: NDArray[np.int32]) -> tuple[NDArray[np.int64], list[int]]:
        """Look up the groups of one layer's expert ids.

        Args:
            layer: The layer.
            ids_TK: Expert ids, ``(T, K)``, -1 for none; none is below -1.

        Returns:
            The groups, ``(T, K)``, -1 for none, and the ids that are not held.
        """
        table_E = self._layers.get(layer, _NOTHING_HELD)
        groups_TK = table_E[np.minimum(ids_TK, len(table_E) - 1)]
        unknown = groups_TK < 0
        if unknown.any():
            unknown &= ids_TK >= 0
        return groups_TK, sorted(set(ids_TK[unknown].tolist()))
