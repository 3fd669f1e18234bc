"""The nvshmem transport: windows from symmetric memory, control calls over a unix socket or TCP.

A window travels in a handshake as the number of its PE, in words: where it lies follows from that.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from torch_eaas.comm.nvshmem import Far, NvshmemWorld
from torch_eaas.comm.socket_transport import SocketTransport
from torch_eaas.comm.window import Memory, Window, WindowMaker, check_size
from torch_eaas.errors import ConfigError, TransportError


class NvshmemTransport(SocketTransport):
    """Windows in the symmetric memory of processes that started together.

    A peer's death is not survivable, and its access cannot be revoked: see ``comm.nvshmem``.

    Args:
        world: This process among the others; the caller keeps it.
    """

    def __init__(self, world: NvshmemWorld) -> None:
        super().__init__(NvshmemWindows(world))
        self.world = world


class NvshmemWindows(WindowMaker):
    """Hands out the windows that were dealt at the start, and takes in those of peers.

    Args:
        world: This process among the others.
    """

    name = "nvshmem"
    in_words = True

    def __init__(self, world: NvshmemWorld) -> None:
        self._world = world

    @override
    def create(self, nbytes: int) -> Window:
        """Return a window that gets its place when the handshake has told whose it is.

        What this process has put into windows of earlier epochs has then arrived: the caller has
        taken the pair out of its tables, and let the last replay that knew it end.
        """
        check_size(nbytes)
        world = self._world
        if nbytes > world.own_bytes:
            raise ConfigError(
                f"a window of {nbytes} bytes is asked for, and those of this start have "
                f"{world.own_bytes}: give NvshmemWorld.open the largest spec of all pairs"
            )
        world.library.settle(world.config.settle_s)
        return OwnWindow(world, nbytes)

    @override
    def tell(self, window: Window) -> Any:
        config = self._world.config
        return {
            "pe": config.pe,
            "start": self._world.name,
            "nbytes": window.nbytes,
            "role": config.role,
        }

    @override
    def adopt(self, fd: int, told: Any) -> Window:
        world = self._world
        try:
            pe, start, nbytes, role = (told[key] for key in ("pe", "start", "nbytes", "role"))
        except (TypeError, KeyError):
            raise TransportError(
                "what came is no window of NVSHMEM's; do both ends use this transport?"
            ) from None
        if type(pe) is not int or not 0 <= pe < world.config.num_pes:
            raise TransportError(
                f"the peer's window must be of a PE below {world.config.num_pes}, got {pe!r}"
            )
        if type(nbytes) is not int or not 0 < nbytes <= world.far_bytes:
            raise TransportError(
                f"a window of PE {pe} has at most {world.far_bytes} bytes, got {nbytes!r}"
            )
        if start != world.name:
            raise TransportError(
                f"PE {pe} belongs to another start of NVSHMEM ({start!r}, this is {world.name}): "
                f"the set of PEs is fixed, so all processes must be started together"
            )
        if role == world.config.role:
            raise TransportError(f"PE {pe} is a {role} too; open its world as what it is")
        return PeersWindow(world, pe, nbytes)


class _NvshmemWindow(Window):
    """What both kinds have in common."""

    def __init__(self, world: NvshmemWorld, nbytes: int) -> None:
        self._world = world
        self.nbytes = nbytes

    @property
    @override
    def view(self) -> memoryview:
        raise TransportError(
            "this window lies in GPU memory, where the host reads nothing: take window.memory, "
            "and use DeviceClient and DeviceServer"
        )

    @property
    @override
    def fd(self) -> int:
        raise TransportError("this window has no file descriptor: it is told in words")

    @override
    def close(self) -> None:
        pass


class OwnWindow(_NvshmemWindow):
    """A window that one peer writes into; ``meet`` says which."""

    def __init__(self, world: NvshmemWorld, nbytes: int) -> None:
        super().__init__(world, nbytes)
        self._address = 0

    @property
    @override
    def memory(self) -> Memory:
        if not self._address:
            raise TransportError(
                "this window has no place before the handshake has told whose it is: call "
                "pair_up(own, peers) first"
            )
        return Memory(self._address, self.nbytes, self._world)

    def meet(self, pe: int) -> None:
        """Lie where a PE writes; what earlier epochs left there is cleared."""
        address = self._world.own_window(pe)
        self._world.library.clear(address, self.nbytes, self._world.config.settle_s)
        self._address = address


class PeersWindow(_NvshmemWindow):
    """A window of a peer; ``memory`` is what this process writes, there or in its staging.

    Args:
        world: This process among the others.
        pe: Whose it is.
        nbytes: Its size.
    """

    def __init__(self, world: NvshmemWorld, pe: int, nbytes: int) -> None:
        super().__init__(world, nbytes)
        self.pe = pe
        far = world.far_window(pe)
        direct = world.library.direct(far.window, pe)
        self.far: Far | None = None if direct else far
        """How puts reach it; None where stores do, as over NVLink."""
        self._address = direct or world.staging(pe)

    @property
    @override
    def memory(self) -> Memory:
        return Memory(self._address, self.nbytes, self._world)


def pair_up(own: Window, peers: Window) -> Far | None:
    """Tell a pair's two windows of each other, at either end, before their memory is asked for.

    Args:
        own: The window that ``create_window`` made here for the handshake.
        peers: The one that the handshake brought.

    Returns:
        How puts reach the peer's window; None where stores do, with this transport or another.
    """
    if not isinstance(own, OwnWindow) or not isinstance(peers, PeersWindow):
        return None
    own.meet(peers.pe)
    return peers.far
