"""What a client's control plane needs of an open pair, whoever reads and writes its windows."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch_eaas.comm.transport import Link
from torch_eaas.placement import ServerInfo
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.protocol.pairs import ClientPair


class OpenPair(ABC):
    """One open pair as ``Connections`` sees it.

    Args:
        server: The server at the other end.
        link: Its control connection; closing tells that the server is gone.
        spec: What was agreed.
        pair: What the client remembers of this server.
        instance: This client's instance id.
        epoch: The number of the windows.
    """

    must_confirm = False
    """Whether the windows' memory must stay until the server has confirmed that it has left them:
    where it maps memory that this process would free."""

    is_bound = False
    """Whether the next pair to this server gets the same memory: it opens when nobody uses it."""

    def __init__(
        self,
        server: ServerInfo,
        link: Link,
        spec: PairSpec,
        *,
        pair: ClientPair,
        instance: int,
        epoch: int,
    ) -> None:
        self.server, self.name, self.link, self.spec = server, server.name, link, spec
        self.pair = pair
        self.epoch = epoch
        self.instance = instance
        self.lost = False
        self.was_heard = False
        """Whether anything has come through these windows, as far as somebody noted it."""
        self.was_cut = False
        """Whether this client gave the link up in mid-call: then its end is no sign of death."""
        self.is_confirmed = False
        """Whether the server has said that it has left the windows."""
        self.silent_since: float | None = None
        """Since when an answer that was given up is missing, as far as is known."""
        self.late_before = 0
        self.num_late = 0
        """Answers that came after their request was given up: proof of life."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Slots that may be taken now."""

    @property
    @abstractmethod
    def num_given_up(self) -> int:
        """Slots that wait for a late answer."""

    @property
    @abstractmethod
    def num_in_use(self) -> int:
        """Slots whose answer somebody waits for or reads."""

    @abstractmethod
    def reclaim(self) -> int:
        """Free the slots whose late answer has come; return how many."""
