"""A pair whose windows only kernels read and write: the host knows no more than where they lie."""

from __future__ import annotations

from typing_extensions import override

from torch_eaas.comm.nvshmem_transport import PeersWindow, pair_up
from torch_eaas.comm.transport import Link
from torch_eaas.comm.window import Window
from torch_eaas.open_pair import OpenPair
from torch_eaas.ops.pair_table import pair_row
from torch_eaas.ops.put_table import NO_PUT, request_put_row
from torch_eaas.placement import ServerInfo
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.protocol.pairs import ClientPair


class DeviceConnection(OpenPair):
    """One open pair of a client on a device; see ``OpenPair`` for the other arguments.

    Args:
        requests: The request window; its memory stays mapped as long as this pair lives.
        replies: The reply window, likewise.
    """

    must_confirm = True

    def __init__(
        self,
        server: ServerInfo,
        link: Link,
        spec: PairSpec,
        *,
        pair: ClientPair,
        instance: int,
        epoch: int,
        requests: Window,
        replies: Window,
    ) -> None:
        super().__init__(server, link, spec, pair=pair, instance=instance, epoch=epoch)
        far = pair_up(replies, requests)
        self.put_row = NO_PUT
        """What the table of puts says of it."""
        if far is not None:
            self.put_row = request_put_row(spec, window=far.window, pe=far.pe)
        self.is_bound = isinstance(requests, PeersWindow)
        self._requests, self._replies = requests.memory, replies.memory
        self.is_seated = False
        """Whether kernels may be using it: it has a row in the tables."""
        self.late_since: float | None = None
        """When a wait for it failed first, while it has never answered."""
        self.row = pair_row(
            spec,
            requests=self._requests.address,
            replies=self._replies.address,
            instance=instance,
            epoch=epoch,
        )
        """What the table of pairs says of it."""

    @property
    @override
    def num_free(self) -> int:
        return self.spec.slots

    @property
    @override
    def num_given_up(self) -> int:
        # a window with an answer missing is left at once: see ``DeviceFailover``
        return 0

    @property
    @override
    def num_in_use(self) -> int:
        return int(self.is_seated)

    @override
    def reclaim(self) -> int:
        return 0
