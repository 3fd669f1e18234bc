"""The stage that sends what was staged, for an end whose peers only puts reach.

It stands behind ``write_requests`` or ``write_replies`` of every captured graph of an end on the
nvshmem transport, whatever its pairs are at the time: a pair's row says whether there is something
to put. With other transports it is no stage at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_eaas.comm.nvshmem_transport import NvshmemTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.ops.pair_table import ClientTables, ServerTables
from torch_eaas.ops.put_linking import load_put_kernel
from torch_eaas.ops.put_slots import put_replies, put_requests


class Puts:
    """One end's stage of puts.

    Making it on a GPU links and loads the kernel, which takes 10 to 30 s where Triton's cache is
    cold: before any graph is captured, and before any kernel spins.

    Args:
        transport: The end's transport.
        device: Where its kernels run.

    Raises:
        ConfigError: NVSHMEM's device library does not link; says what to install.
        TransportError: NVSHMEM refuses the kernel.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._world = transport.world if isinstance(transport, NvshmemTransport) else None
        self._bitcode = ""
        if self._world is not None and device.type == "cuda":
            self._bitcode = str(self._world.library.bitcode)
            self._world.library.register(load_put_kernel(self._bitcode, device))

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to send in this stage."""
        return self._world is not None

    def send_requests(
        self, tables: ClientTables, puts_PQ: Tensor, counts_P: Tensor, gate: Tensor
    ) -> None:
        """Send what ``write_requests`` staged, behind the same gate."""
        if self.is_needed:
            put_requests(tables, puts_PQ, counts_P, gate, bitcode=self._bitcode)

    def send_replies(
        self,
        tables: ServerTables,
        puts_PQ: Tensor,
        statuses_R: Tensor,
        ready_R: Tensor,
        gate: Tensor,
    ) -> None:
        """Send what ``write_replies`` staged."""
        if self.is_needed:
            put_replies(tables, puts_PQ, statuses_R, ready_R, gate, bitcode=self._bitcode)

    def settle(self) -> None:
        """Wait until what was sent has arrived; PeerTimeout if it does not."""
        if self._world is not None:
            self._world.library.settle(self._world.config.settle_s)
