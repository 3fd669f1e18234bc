"""One server's experts: the weights of some (layer, expert) pairs, and nothing else.

Shape legend: T tokens, K experts per token, R = T * K rows, G groups held, D hidden,
I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torch_eaas.capture import refuse_device
from torch_eaas.config import Storage, check_at_least, check_choice
from torch_eaas.errors import ConfigError
from torch_eaas.ops.grouped_linear import grouped_linear
from torch_eaas.ops.grouping import pieces, sorted_rows
from torch_eaas.ops.matrix import Fp8Matrix, Matrix, keep_matrix
from torch_eaas.ops.quantize import dequantize_blocks, quantize_blocks
from torch_eaas.ops.reference import swiglu_ref
from torch_eaas.placement import holdings_from

_NOTHING_HELD = np.full(1, -1, dtype=np.int64)

_PIECE_NUMBERS = 1 << 18
"""A large batch is run in pieces of about so many numbers a tensor: they stay in the cache, and
malloc keeps their memory, where large tensors cost a page fault for each page."""

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


def check_weights(
    layer: int, expert: int, weights: ExpertWeights, hidden_size: int, intermediate_size: int
) -> None:
    """Refuse an expert that is not one of these sizes.

    Raises:
        ConfigError: A matrix has another shape, is not of floats, or scales are missing.
    """
    wanted = (intermediate_size, hidden_size)
    scales = weights.scales or (None, None, None)
    for name, matrix, scale, shape in (
        ("gate", weights.gate_ID, scales[0], wanted),
        ("up", weights.up_ID, scales[1], wanted),
        ("down", weights.down_DI, scales[2], wanted[::-1]),
    ):
        if tuple(matrix.shape) != shape:
            raise ConfigError(
                f"layer {layer}, expert {expert}: {name} must be {shape}, got {tuple(matrix.shape)}"
            )
        if not matrix.is_floating_point():
            raise ConfigError(
                f"layer {layer}, expert {expert}: {name} must be of floats, got {matrix.dtype}"
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


class _Expert(NamedTuple):
    """One expert as it is kept, gate and up stacked: ``(2 I, D)`` and ``(D, I)``."""

    gate_up: Matrix
    down: Matrix


def _kept(weights: ExpertWeights, storage: Storage) -> _Expert:
    """Return an expert as a pool keeps it: laid out anew, or the FP8 numbers that are given."""
    if storage != "fp8":
        gate_ID, up_ID, down_DI = weights.dequantized()
        dtype = STORAGE_DTYPES[storage]
        gate_up = torch.cat([gate_ID.to(dtype), up_ID.to(dtype)])
        return _Expert(keep_matrix(gate_up), keep_matrix(down_DI.to(dtype, copy=True)))
    fp8 = weights.quantized()
    assert fp8.scales is not None
    gate, up, down = zip((fp8.gate_ID, fp8.up_ID, fp8.down_DI), fp8.scales, strict=True)
    return _Expert(Fp8Matrix([gate, up], fp8.block), Fp8Matrix([down], fp8.block))


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
        self._piece_rows = max(1, _PIECE_NUMBERS // max(hidden_size, 2 * intermediate_size))
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
            check_weights(layer, expert, weights, self.hidden_size, self.intermediate_size)
            new[layer, expert] = _kept(weights, self.storage)
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
        refuse_device("an ExpertPool", "an ExpertSlab in a DeviceServer", x_TD)
        num_tokens, top_k = groups_TK.shape
        order, active, counts = sorted_rows(groups_TK.numpy().reshape(-1))
        order_N, tokens_N = torch.from_numpy(order), torch.from_numpy(order // top_k)
        weights_N1 = torch.from_numpy(weights_TK.detach().numpy().reshape(-1, 1)[order])
        num_out = num_tokens * top_k if per_expert else num_tokens
        out = torch.zeros((num_out, self.hidden_size))
        at = 0
        for first, last in pieces(counts, self._piece_rows):
            rows = slice(at, at := at + sum(counts[first:last]))
            rows_nD = self._run_groups(
                [table.experts[group] for group in active[first:last]],
                counts[first:last],
                x_TD.index_select(0, tokens_N[rows]),
                # only then are rows compared bit by bit: a sum depends on its companions anyway
                deterministic=self.deterministic and per_expert,
            )
            weighted_nD = rows_nD.float().mul_(weights_N1[rows])
            if per_expert:
                out[order_N[rows]] = weighted_nD
            else:
                out.index_add_(0, tokens_N[rows], weighted_nD)
        return out.view(num_tokens, top_k, self.hidden_size) if per_expert else out

    @staticmethod
    def _run_groups(
        experts: Sequence[_Expert], counts: Sequence[int], x_nD: Tensor, *, deterministic: bool
    ) -> Tensor:
        gate_up, down = zip(*experts, strict=True)
        x_nD = x_nD.to(gate_up[0].dtype)
        hidden = grouped_linear(x_nD, gate_up, counts, deterministic=deterministic)
        inner = swiglu_ref(hidden).to(down[0].dtype)
        return grouped_linear(inner, down, counts, deterministic=deterministic)

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
        if not unknown.any():
            return groups_TK, []
        return groups_TK, sorted(set(ids_TK[unknown & (ids_TK >= 0)].tolist()))
