"""What kernels know of servers and placement, rewritten by the host between replays.

Shape suffixes: see ``ops/pair_table.py``; E experts of a layer, H holders of an expert at most.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_eaas.config import ClientConfig
from torch_eaas.connections import Connections
from torch_eaas.device_client_pairs import DeviceConnection
from torch_eaas.device_client_staging import Staged
from torch_eaas.errors import ConfigError
from torch_eaas.ops.pair_table import FREE_ROW, Column
from torch_eaas.ops.put_table import NO_PUT, PutColumn
from torch_eaas.routing import LayerRoutes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Who may be asked for one layer's experts."""

    holders_EH: Staged
    rows_EH: NDArray[np.int32]
    """The same on the host."""


class DeviceTables:
    """The tables of one client; the thread that runs steps writes them, between steps.

    Args:
        config: The client's options.
        connections: The open pairs, which another thread may change at any time.
        instance: The client's instance id: clients spread over equal replicas.
        device: Where the tables lie.
        max_servers: P, rows of the table of pairs: a graph knows no more servers.
        max_replicas: H.
    """

    def __init__(
        self,
        config: ClientConfig,
        connections: Connections[DeviceConnection],
        *,
        instance: int,
        device: torch.device,
        max_servers: int,
        max_replicas: int,
    ) -> None:
        self._name = config.name
        self._instance = instance
        self._connections = connections
        self._device = device
        self._max_replicas = max_replicas
        int64 = torch.int64
        self._pairs = Staged(self._full((max_servers, len(Column)), 0, int64))
        self._puts = Staged(self._full((max_servers, len(PutColumn)), 0, int64))
        self._version = Staged(self._full((1,), 0, int64))
        self.pairs_PC = self._pairs.on_device
        """The table of pairs."""
        self.puts_PQ = self._puts.on_device
        """The table of puts."""
        self.version = self._version.on_device
        """The newest placement's version, ``(1,)`` int64."""
        self.words_PS = self._full((max_servers, config.slots), 0, int64)
        """The last request word of each slot; kernels advance it."""
        self._layers: dict[int, _Layer] = {}
        self._seats: list[DeviceConnection | None] = [None] * max_servers
        self._left: list[DeviceConnection] = []
        self.num_users = 0
        """Calls under way: as long as there are any, the rows that they use stay as they are."""
        self._leaving: list[tuple[torch.cuda.Event | None, DeviceConnection]] = []
        self._changes = -1
        self._avoided: frozenset[str] = frozenset()
        self._unseated: set[str] = set()

    def at(self, row: int) -> DeviceConnection:
        """Return the pair of a row, as the last step knew it."""
        conn = self._seats[row]
        assert conn is not None, f"row {row} of the table of pairs is free"
        return conn

    def has(self, layer: int) -> bool:
        """Return whether a layer has its table yet."""
        return layer in self._layers

    def add(self, layer: int, num_experts: int) -> None:
        """Make a layer's table."""
        shape = (num_experts, self._max_replicas)
        holders_EH = Staged(self._full(shape, -1, torch.int32))
        made = _Layer(holders_EH, np.full(shape, -1, dtype=np.int32))
        self._layers[layer] = made
        self._write_layer(layer, made, self._rows_by_name())

    def holders_of(self, layer: int, num_experts: int) -> Tensor:
        """Return a layer's table, int32; ConfigError if it was made for other experts."""
        table = self._layers[layer].holders_EH.on_device
        if len(table) != num_experts:
            raise ConfigError(
                f"layer {layer} has {len(table)} experts in this client's tables, got num_experts "
                f"{num_experts}; a layer's number of experts does not change"
            )
        return table

    def is_held(self, layer: int, expert: int) -> bool:
        """Return whether somebody can be asked for an expert, as the tables stand.

        Raises:
            ConfigError: The layer has no such expert.
        """
        rows_EH = self._layers[layer].rows_EH
        if expert >= len(rows_EH):
            raise ConfigError(
                f"layer {layer}: expert id {expert} is not within 0 to {len(rows_EH) - 1} "
                f"(-1 and {len(rows_EH)} mean no expert)"
            )
        return bool(rows_EH[expert, 0] >= 0)

    def refresh(self, avoid: Collection[str] = (), *, own: int = 0) -> None:
        """Bring the tables up to date, in order with the current stream's work; usually nothing.

        Args:
            avoid: Servers to ask only where nobody else holds an expert.
            own: Calls under way that are about to begin anew.
        """
        self._let_go()
        may_free = self.num_users <= own
        # read first: what changes meanwhile is seen the next time
        changes, avoided = self._connections.changes, frozenset(avoid)
        is_new = changes != self._changes or avoided != self._avoided
        if not is_new and not (may_free and self._left):
            return
        self._changes, self._avoided = changes, avoided
        self._seat(may_free)
        by_name = self._rows_by_name()
        for layer, table in self._layers.items():
            self._write_layer(layer, table, by_name)
        version = torch.tensor([self._connections.placement.version], device="cpu")
        self._version.write(version)

    def close(self) -> None:
        """Forget all pairs."""
        self._seats = [None] * len(self._seats)
        self._left, self._leaving = [], []

    # -- the table of pairs --------------------------------------------------------------------

    def _seat(self, may_free: bool) -> None:
        """Free the rows of pairs that have ended, if that may be, and give rows to new ones."""
        wanted = {server.instance for server in self._connections.placement.servers}
        live = {conn for conn in self._connections.live.values() if conn.server.instance in wanted}
        self._left = [conn for conn in self._seats if conn is not None and conn not in live]
        seats = self._seats.copy()
        if may_free:
            seats = [None if conn in self._left else conn for conn in seats]
        unseated = set()
        for conn in sorted(live.difference(seats), key=lambda conn: conn.name):
            if None not in seats:
                unseated.add(conn.name)
                continue
            row = seats.index(None)
            seats[row] = conn
            conn.is_seated = True
            # its windows are new, and so are their words
            self.words_PS[row].zero_()
        if seats != self._seats:
            self._seats = seats
            rows = [FREE_ROW if conn is None else conn.row for conn in seats]
            self._pairs.write(torch.tensor(rows, device="cpu"))
            puts = [NO_PUT if conn is None else conn.put_row for conn in seats]
            self._puts.write(torch.tensor(puts, device="cpu"))
        if may_free:
            self._see_off(self._left)
            self._left = []
        self._tell_unseated(unseated)

    def _tell_unseated(self, unseated: set[str]) -> None:
        if unseated > self._unseated:
            logger.warning(
                "client %s: no row is left for %s; raise max_servers (now %d)",
                self._name,
                ", ".join(sorted(unseated)),
                len(self._seats),
            )
        self._unseated = unseated

    def _see_off(self, left: list[DeviceConnection]) -> None:
        """Keep pairs until no kernel that was launched before now can use them."""
        passed: torch.cuda.Event | None = None
        if left and self._device.type == "cuda":
            passed = torch.cuda.Event()
            passed.record(torch.cuda.current_stream(self._device))
        self._leaving += [(passed, conn) for conn in left]
        self._let_go()

    def _let_go(self) -> None:
        if not self._leaving:
            return
        gone = [conn for passed, conn in self._leaving if passed is None or _is_past(passed)]
        self._leaving = [each for each in self._leaving if each[1] not in gone]
        for conn in gone:
            conn.is_seated = False

    # -- layers --------------------------------------------------------------------------------

    def _rows_by_name(self) -> dict[str, int]:
        """Return the rows of those who can be asked."""
        return {
            conn.name: row
            for row, conn in enumerate(self._seats)
            if conn is not None and conn not in self._left
        }

    def _write_layer(self, layer: int, table: _Layer, by_name: dict[str, int]) -> None:
        num_experts, width = table.rows_EH.shape
        suspects = [name for name in self._connections.suspects if name not in self._avoided]
        routes = LayerRoutes(
            self._connections.placement,
            layer,
            num_experts,
            # a server without a row cannot be asked
            open_servers=by_name,
            suspects=[*suspects, *sorted(self._avoided)],
            salt=self._instance,
        )
        # one entry more, -1: it stands for nobody
        row_of = np.array([*(by_name.get(name, -1) for name in routes.servers), -1], np.int32)
        seated_EH = row_of[routes.holders_EH[:, :width]]
        rows_EH = np.full_like(table.rows_EH, -1)
        rows_EH[:, : seated_EH.shape[1]] = seated_EH
        if not np.array_equal(rows_EH, table.rows_EH):
            table.rows_EH[:] = rows_EH
            table.holders_EH.write(torch.from_numpy(rows_EH))

    def _full(self, shape: tuple[int, ...], value: int, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self._device)


def _is_past(event: torch.cuda.Event) -> bool:
    """Return whether all work before an event is done."""
    return bool(event.query())
