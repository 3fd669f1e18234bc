"""Which replica serves which expert of a batch: pure arithmetic on the host.

Shape legend: T tokens, K experts per token, E experts of a layer, S servers, H holders of an
expert at most, n pairs of an expert and a holder.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_eaas.placement import PLACED_STATES, Placement

_MASK = (1 << 64) - 1

_CLOSED = 1 << 60
"""The rank of a server that cannot be asked."""


def mix(*numbers: int) -> int:
    """Return a 64-bit hash of integers; the same in every process (splitmix64's steps)."""
    state: int = 0
    for number in numbers:
        state = _stir(state + number)
    return state


def mix_each(*numbers: int, count: int) -> NDArray[np.uint64]:
    """Return ``mix(*numbers, i)`` for each i below ``count``."""
    hashes: NDArray[np.uint64] = _stir(np.uint64(mix(*numbers)) + np.arange(count, dtype=np.uint64))
    return hashes


def _stir(state: Any) -> Any:
    """Return a round of the hash, of a number or of an array of uint64."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class LayerRoutes:
    """The servers to ask for one layer's experts, as one client sees them now.

    Args:
        placement: Who holds what.
        layer: The layer.
        num_experts: E.
        open_servers: Names of the servers with an open pair.
        suspects: Those of them to ask only while nobody else holds an expert, the best first.
        salt: This client's instance id: clients spread over equal replicas.
    """

    def __init__(
        self,
        placement: Placement,
        layer: int,
        num_experts: int,
        *,
        open_servers: Collection[str],
        suspects: Sequence[str],
        salt: int,
    ) -> None:
        self.layer = layer
        self.servers = tuple(server.name for server in placement.servers)
        order = {name: 1 + i for i, name in enumerate(suspects)}
        worst = len(PLACED_STATES)
        rank_S = np.array(
            [
                order.get(server.name, 0) * worst + server.rank
                if server.name in open_servers
                else _CLOSED
                for server in placement.servers
            ],
            dtype=np.int64,
        )
        rank_ES = np.full((num_experts, len(self.servers)), _CLOSED)
        for i, server in enumerate(placement.servers):
            held = np.array(server.holdings.get(layer, ()), dtype=np.int64)
            rank_ES[held[held < num_experts], i] = rank_S[i]
        best_E1 = rank_ES.min(1, keepdims=True, initial=_CLOSED)
        is_asked_ES = (rank_ES == best_E1) & (best_E1 < _CLOSED)
        self.holders_EH = _in_turn(is_asked_ES, mix_each(salt, layer, count=num_experts))
        """Of each expert the servers that may be asked, indices into ``servers``, int16, filled up
        with -1; the first of them is another one for another client, or expert."""
        # one entry more, -1: it serves the id -1
        self._table = np.append(self.holders_EH[:, 0], np.int16(-1))
        self.is_complete = bool((self._table[:-1] >= 0).all())
        """Whether every expert has a server that can be asked."""
        self.has_replicas = self.holders_EH.shape[1] > 1

    @cached_property
    def _holders(self) -> list[list[int]]:
        return [[i for i in row if i >= 0] for row in self.holders_EH.tolist()]

    def choose(self, ids_TK: NDArray[np.int64]) -> NDArray[np.int16]:
        """Choose one server per expert of this batch: the holder with the fewest active experts.

        Args:
            ids_TK: Expert ids, ``(T, K)``, -1 for none.

        Returns:
            Indices into ``servers``, ``(T, K)``, -1 for no expert or no holder.
        """
        if not self.has_replicas:
            return self._table[ids_TK]
        table = self._table.copy()
        loads = [0] * len(self.servers)
        present = np.zeros(len(table), dtype=bool)
        present[ids_TK] = True
        for expert in np.flatnonzero(present[:-1]).tolist():
            holders = self._holders[expert]
            if holders:
                server = min(holders, key=loads.__getitem__)
                loads[server] += 1
                table[expert] = server
        return table[ids_TK]


def _in_turn(is_asked_ES: NDArray[np.bool_], turn_E: NDArray[np.uint64]) -> NDArray[np.int16]:
    """List each expert's servers, beginning with another one by its turn, ``(E, H)``.

    Example:
        Servers 0, 2 and 3 with turn 4 are ``[2, 3, 0]``.
    """
    count_E = is_asked_ES.sum(1)
    listed_EH = np.full((len(is_asked_ES), max(1, count_E.max(initial=0))), -1, dtype=np.int16)
    expert_n, server_n = is_asked_ES.nonzero()
    count_n = count_E[expert_n]
    place_n = (is_asked_ES.cumsum(1) - 1)[expert_n, server_n]
    turn_n = (turn_E[expert_n] % count_n.astype(np.uint64)).astype(np.int64)
    listed_EH[expert_n, (place_n - turn_n) % count_n] = server_n
    return listed_EH
