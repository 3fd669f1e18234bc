"""Which replica serves which expert of a batch: pure arithmetic on the host.

Shape legend: T tokens, K experts per token, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from torch_eaas.placement import Placement

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Return a 64-bit hash of integers; the same in every process (splitmix64's steps)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


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
        # one entry more, -1: it serves the id -1
        self._table = np.full(num_experts + 1, -1, dtype=np.int16)
        self._holders: list[tuple[int, ...]] = []
        order = {name: 1 + i for i, name in enumerate(suspects)}
        rank = {
            i: (order.get(server.name, 0), server.rank)
            for i, server in enumerate(placement.servers)
            if server.name in open_servers
        }
        for expert in range(num_experts):
            holders = [i for i in placement.holders(layer, expert) if i in rank]
            best = min((rank[i] for i in holders), default=(0, 0))
            holders = [i for i in holders if rank[i] == best]
            turn = mix(salt, layer, expert) % len(holders) if holders else 0
            self._holders.append(tuple(holders[turn:] + holders[:turn]))
            if holders:
                self._table[expert] = self._holders[-1][0]
        self.is_complete = bool((self._table[:-1] >= 0).all())
        """Whether every expert has a server that can be asked."""
        self.has_replicas = any(len(holders) > 1 for holders in self._holders)

    @property
    def holders(self) -> Sequence[tuple[int, ...]]:
        """Of each expert the servers that may be asked, indices into ``servers``.

        The first of them is another one for another client, or expert.
        """
        return self._holders

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
