"""The stage that sends what was staged, for an end whose peers only puts reach.

It stands behind ``write_requests`` or ``write_replies`` of every captured graph of an end on the
nvshmem transport, whatever its pairs are at the time: a pair's row says whether there is something
to put. With other transports it is no stage at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_eaas.comm.nvshmem import Far
from torch_eaas.comm.nvshmem_transport import NvshmemTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.ops.pair_table import ClientTables, ServerTables
from torch_eaas.ops.put_linking import load_put_kernel
from torch_eaas.ops.put_slots import put_replies, put_requests
from torch_eaas.ops.put_table import NO_PUT, reply_put_row, request_put_row
from torch_eaas.protocol.layout import PairSpec


class Puts:
    """One end's table of puts and its stage.

    Making it on a GPU links and loads the kernel, which takes 10 to 30 s where Triton's cache is
    cold: before any graph is captured, and before any kernel spins.

    Args:
        transport: The end's transport.
        pairs: Rows of its table of pairs.
        device: Where its kernels run.

    Raises:
        ConfigError: NVSHMEM's device library does not link; says what to install.
        TransportError: NVSHMEM refuses the kernel.
    """

    def __init__(self, transport: Transport, pairs: int, device: torch.device | str) -> None:
        self.is_needed = isinstance(transport, NvshmemTransport)
        """Whether there is anything to send in this stage."""
        self.table_PQ = torch.tensor([NO_PUT] * pairs, device=device).view(pairs, len(NO_PUT))
        self._bitcode = ""
        if isinstance(transport, NvshmemTransport) and self.table_PQ.is_cuda:
            library = transport.world.library
            self._bitcode = str(library.bitcode)
            library.register(load_put_kernel(self._bitcode, device))

    def reach_server(self, p: int, spec: PairSpec, far: Far | None) -> None:
        """Note how a client's pair reaches its server; ``far`` is what ``pair_up`` said.

        Like the table of pairs, this one is written between replays.
        """
        row = NO_PUT if far is None else request_put_row(spec, window=far.window, pe=far.pe)
        self.table_PQ[p].copy_(torch.tensor(row))

    def reach_client(self, p: int, spec: PairSpec, far: Far | None) -> None:
        """Note how a server's pair reaches its client."""
        row = NO_PUT if far is None else reply_put_row(spec, window=far.window, pe=far.pe)
        self.table_PQ[p].copy_(torch.tensor(row))

    def send_requests(self, tables: ClientTables, counts_P: Tensor, gate: Tensor) -> None:
        """Send what ``write_requests`` staged, behind the same gate."""
        if self.is_needed:
            put_requests(tables, self.table_PQ, counts_P, gate, bitcode=self._bitcode)

    def send_replies(
        self, tables: ServerTables, statuses_R: Tensor, ready_R: Tensor, gate: Tensor
    ) -> None:
        """Send what ``write_replies`` staged."""
        if self.is_needed:
            put_replies(tables, self.table_PQ, statuses_R, ready_R, gate, bitcode=self._bitcode)
