"""A device server's pairs: their windows' memory, and their rows in the table on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_eaas.comm.nvshmem_transport import pair_up
from torch_eaas.comm.window import Window
from torch_eaas.device.stream import DeviceStream, Mark, Mirror
from torch_eaas.ops.clock import read_clock
from torch_eaas.ops.pair_table import FREE_ROW, ServerTables, pair_row
from torch_eaas.ops.put_table import NO_PUT, reply_put_row
from torch_eaas.protocol.layout import PairSpec


class DevicePair:
    """One client's windows as a device reads and writes them.

    Args:
        peer: The control connection that the pair came over.
        client: The client's name, for messages.
        instance: The client's instance id.
        epoch: The number of the pair's window.
        spec: What was agreed.
        requests: The request window; the client writes it.
        replies: The reply window; the device writes it.
        now: The server's clock; a device has one of its own.
    """

    def __init__(
        self,
        *,
        peer: int,
        client: str,
        instance: int,
        epoch: int,
        spec: PairSpec,
        requests: Window,
        replies: Window,
        now: float,
    ) -> None:
        self.peer, self.client, self.instance, self.epoch = peer, client, instance, epoch
        self.spec = spec
        self.is_silent = False
        """Whether the client may be dead; it is looked at all the same, which costs nothing."""
        far = pair_up(requests, replies)
        self.put_row = NO_PUT if far is None else reply_put_row(spec, window=far.window, pe=far.pe)
        """What the table of puts says of it."""
        # mapped as long as this pair lives
        self.requests, self.replies = requests.memory, replies.memory
        self.row = pair_row(
            spec,
            requests=self.requests.address,
            replies=self.replies.address,
            instance=instance,
            epoch=epoch,
        )


class PairRows:
    """Which pair has which row of the table on the device.

    Args:
        tables: The device's.
        puts_PQ: Its table of puts.
        stream: Where they are read.
    """

    def __init__(self, tables: ServerTables, puts_PQ: Tensor, stream: DeviceStream) -> None:
        self._tables = tables
        self._stream = stream
        # first, for a mirror waits for what was enqueued here on another stream
        self._now = torch.zeros_like(tables.turn)
        # as for a new pair: CUDA loads a kernel with its first launch, and may wait for others then
        tables.book_3PS[:, 0].zero_()
        self._table = Mirror(tables.pairs_PC, stream)
        self._puts = Mirror(puts_PQ, stream)
        self._given_up: list[tuple[DevicePair, Mark]] = []
        self.rows: dict[int, DevicePair] = {}
        """The pairs on the device, by row."""

    def apply(self, pairs: Sequence[DevicePair]) -> None:
        """Enqueue what makes these, and no others, the pairs of all iterations to come."""
        gone = {row: pair for row, pair in self.rows.items() if pair not in pairs}
        known = set(self.rows.values())
        new = [pair for pair in pairs if pair not in known]
        if not (gone or new):
            return
        kept = {row: pair for row, pair in self.rows.items() if row not in gone}
        free = [row for row in range(len(self._tables.pairs_PC)) if row not in kept]
        opened = dict(zip(free, new, strict=False))
        wanted_PC = torch.tensor([FREE_ROW] * len(self._tables.pairs_PC))
        wanted_PQ = torch.tensor([NO_PUT] * len(wanted_PC))
        for row, pair in (kept | opened).items():
            wanted_PC[row] = torch.tensor(pair.row)
            wanted_PQ[row] = torch.tensor(pair.put_row)
        self._table.wanted, self._puts.wanted = wanted_PC, wanted_PQ
        for row in opened:
            self._tables.book_3PS[:, row].zero_()
        if opened:
            read_clock(self._now)
            for row in opened:
                self._tables.scanned_P[row : row + 1].copy_(self._now)
        self._table.push()
        self._puts.push()
        # iterations under way may still write into windows that were given up
        mark = self._stream.mark()
        self._given_up += [(pair, mark) for pair in gone.values()]
        self.rows = kept | opened

    def release(self) -> None:
        """Let go of the windows that no iteration can write into any more."""
        if self._given_up:
            self._given_up = [each for each in self._given_up if not each[1].is_passed]
