"""Experts for tests: of a planned delay, and of random weights.

Shape legend: T tokens, K experts per token, D hidden, I intermediate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torch_eaas.errors import ConfigError
from torch_eaas.experts import ExpertPool, ExpertWeights, GroupTable
from torch_eaas.placement import Holdings
from torch_eaas.server_batch import Experts

Weights = Mapping[tuple[int, int], ExpertWeights]
"""(layer, expert) to that expert's matrices."""

MOST_LATE_S = 2e-4


class DelayedExperts(Experts):
    """Experts that take a planned time and no core: each batch sleeps, then answers.

    A sleep ends late, by 0.1 ms and more; the next ones are shortened by what the last ones were
    late, at most by ``MOST_LATE_S``, so that batches take what is planned on average.

    Args:
        hidden_size: D.
        holdings: Layer to the ids of the experts held.
        delay: How long each batch takes, beside what ``pool`` takes.
        pool: What computes the answers, which must hold ``holdings``; without one they are zeros.
    """

    def __init__(
        self,
        hidden_size: int,
        holdings: Holdings,
        delay: timedelta,
        *,
        pool: ExpertPool | None = None,
    ) -> None:
        if pool is not None and pool.hidden_size != hidden_size:
            raise ConfigError(f"the pool has hidden size {pool.hidden_size}, not {hidden_size}")
        self._hidden_size = hidden_size
        self._holdings = holdings
        self._pool = pool
        self.delay = delay
        self._late_s = 0.0
        self._zeros: dict[tuple[int, ...], Tensor] = {}
        nobody: Any = None
        self._table = GroupTable(
            {(layer, expert): nobody for layer, ids in holdings.items() for expert in ids}
        )

    @property
    @override
    def hidden_size(self) -> int:
        return self._hidden_size

    @property
    @override
    def holdings(self) -> Holdings:
        return self._holdings

    @property
    @override
    def table(self) -> GroupTable:
        return self._table if self._pool is None else self._pool.table

    @override
    def run(
        self,
        table: GroupTable,
        x_TD: Tensor,
        groups_TK: Tensor,
        weights_TK: Tensor,
        *,
        per_expert: bool,
    ) -> Tensor:
        self._sleep(self.delay.total_seconds())
        if self._pool is not None:
            return self._pool.run(table, x_TD, groups_TK, weights_TK, per_expert=per_expert)
        shape = (*(groups_TK.shape if per_expert else groups_TK.shape[:1]), self._hidden_size)
        # made once: a new tensor of this size costs a page fault for each of its pages
        if shape not in self._zeros:
            self._zeros[shape] = torch.zeros(shape)
        return self._zeros[shape]

    def _sleep(self, seconds: float) -> None:
        if seconds > self._late_s:
            started = time.monotonic()
            time.sleep(seconds - self._late_s)
            late_s = time.monotonic() - started - seconds
            self._late_s = min(max(0.0, self._late_s + late_s / 8), MOST_LATE_S)


def random_experts(
    hidden_size: int, intermediate_size: int, layers: list[int], num_experts: int, seed: int = 0
) -> dict[tuple[int, int], ExpertWeights]:
    """Return random fp32 weights of every expert of some layers; the same for the same seed.

    Their scale keeps outputs near the size of the inputs.

    Args:
        hidden_size: D.
        intermediate_size: I.
        layers: The layers' numbers.
        num_experts: Experts of each layer.
        seed: Of the generator.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).div_(columns**0.5)

    wide = (intermediate_size, hidden_size)
    return {
        (layer, expert): ExpertWeights(matrix(*wide), matrix(*wide), matrix(*wide[::-1]))
        for layer in layers
        for expert in range(num_experts)
    }
