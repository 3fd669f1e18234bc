"""NVSHMEM: client and server are GPUs on one fabric; kernels put requests into each other's memory.

The set of processes (PEs) is fixed when they start, and so is the memory: for every PE a window of
each direction, dealt out once and bound to that PE for life. A PE is a client or a server. At a
server the windows of requests are what its clients write into, and at a client, at the same place,
the *staging* for what it puts there; the windows of replies likewise, the other way round.

What does not hold here: when a PE dies, a put to it may spin inside NVSHMEM or abort the survivors
(invariants 1, 3 and 4), and a peer's access to its windows cannot be revoked.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from torch_eaas.comm.nvshmem_library import NvshmemLibrary
from torch_eaas.config import check_at_least, check_choice
from torch_eaas.errors import ConfigError
from torch_eaas.protocol.layout import PairSpec, align

PES_DIE_TOGETHER = (
    "the set of PEs is fixed; when one dies the others may hang or abort (invariants 1, 3 and 4 "
    "do not hold), and no access can be revoked; launch spare servers as standbys"
)

Role = Literal["client", "server"]
Exchange = Callable[[bytes | None], bytes]
"""PE 0 gives the id and gets it back; the others give None and get what PE 0 gave."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvshmemConfig:
    """What a process is among those that start together."""

    role: Role
    """Client or server."""

    pe: int
    """This process's number, from 0."""

    num_pes: int
    """How many start together; no more can come."""

    device: int = 0
    """The GPU's number in this process."""

    ibgda: bool = False
    """Whether kernels reach the network card themselves, instead of through a thread of the host.
    Say it here, not by NVSHMEM_IB_ENABLE_IBGDA: it is checked, and then set."""

    start_s: float = 120.0
    """How long to wait until all have come."""

    settle_s: float = 10.0
    """How long what was put before may take to arrive when a pair gets new windows."""

    def __post_init__(self) -> None:
        check_choice("role", self.role, Role)
        check_at_least("num_pes", self.num_pes, 1)
        check_at_least("pe", self.pe, 0)
        if self.pe >= self.num_pes:
            raise ConfigError(f"pe must be below num_pes = {self.num_pes}, got {self.pe}")


@dataclass(frozen=True, slots=True)
class Far:
    """How puts reach a peer's window: what the table of puts needs."""

    window: int
    """Its symmetric address."""
    pe: int


class NvshmemWorld:
    """This process among those that started together, and the memory that they share.

    Args:
        config: What this process is.
        spec: The pairs' sizes; the same in all processes.
        library: NVSHMEM, started.
        unique_id: What they started under.
    """

    def __init__(
        self, config: NvshmemConfig, spec: PairSpec, library: NvshmemLibrary, unique_id: bytes
    ) -> None:
        self.config = config
        self.library = library
        self.name = hashlib.sha256(unique_id).hexdigest()[:16]
        """The same in all processes of one start, and in no other."""
        self.request_bytes, self.reply_bytes = align(spec.request_bytes), align(spec.reply_bytes)
        self._requests = library.allocate(config.num_pes * self.request_bytes)
        self._replies = library.allocate(config.num_pes * self.reply_bytes)
        logger.info(
            "nvshmem: PE %d of %d, a %s, %.1f MiB of symmetric memory; %s",
            *(config.pe, config.num_pes, config.role),
            config.num_pes * (self.request_bytes + self.reply_bytes) / 2**20,
            PES_DIE_TOGETHER,
        )

    @classmethod
    def open(
        cls,
        config: NvshmemConfig,
        spec: PairSpec,
        exchange: Exchange,
        *,
        library: NvshmemLibrary | None = None,
    ) -> Self:
        """Start together with the other processes: all must call it, and it waits for them.

        Args:
            config: What this process is.
            spec: The pairs' sizes, the same in all processes: too many bytes are wasted, too few
                make the handshake fail.
            exchange: Hands PE 0's id to the others, with a deadline of its own; the monitor's
                rendezvous is one.
            library: NVSHMEM; by default the installed one.

        Raises:
            ConfigError: Something is missing, or NVSHMEM did not start; says what to do.
            PeerTimeout: PE 0's id, or one of the others, has not come.
        """
        library = library or NvshmemLibrary(config.device, ibgda=config.ibgda)
        unique_id = exchange(library.new_id() if config.pe == 0 else None)
        library.start(unique_id, config.pe, config.num_pes, config.start_s)
        return cls(config, spec, library, unique_id)

    @property
    def own_bytes(self) -> int:
        """Size of a window that peers write into here."""
        return self.request_bytes if self.config.role == "server" else self.reply_bytes

    @property
    def far_bytes(self) -> int:
        """Size of a window that this process writes into at a peer."""
        return self.reply_bytes if self.config.role == "server" else self.request_bytes

    def own_window(self, pe: int) -> int:
        """Return the window that a PE writes into here."""
        is_server = self.config.role == "server"
        return self._requests_of(pe) if is_server else self._replies_of(pe)

    def staging(self, pe: int) -> int:
        """Return where this process prepares what it puts into a PE's window."""
        is_server = self.config.role == "server"
        return self._replies_of(pe) if is_server else self._requests_of(pe)

    def far_window(self, pe: int) -> Far:
        """Return how puts reach the window that this process writes into at a PE."""
        # it lies there where this process stages what it puts to itself
        return Far(self.staging(self.config.pe), pe)

    def _requests_of(self, pe: int) -> int:
        return self._requests + pe * self.request_bytes

    def _replies_of(self, pe: int) -> int:
        return self._replies + pe * self.reply_bytes
