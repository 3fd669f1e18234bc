"""The nvshmem transport: windows from symmetric memory, control calls over a unix socket.

A window travels in a handshake as the number of its PE: where it lies follows from that. Control
calls reach processes of this host alone; between hosts there is no control endpoint yet.
"""

from __future__ import annotations

import contextlib
import json
import os

from typing_extensions import override

from torch_eaas.comm.nvshmem import Far, NvshmemWorld
from torch_eaas.comm.unix_transport import UnixTransport
from torch_eaas.comm.window import Memory, Window, WindowMaker, check_size
from torch_eaas.errors import ConfigError, TransportError

_MAX_DESCRIPTION = 1024


class NvshmemTransport(UnixTransport):
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
    def adopt(self, fd: int, nbytes: int) -> Window:
        try:
            return _adopt(self._world, fd, nbytes)
        finally:
            os.close(fd)


def _adopt(world: NvshmemWorld, fd: int, nbytes: int) -> PeersWindow:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        told = json.loads(os.pread(fd, _MAX_DESCRIPTION, 0))
        pe, start, size, role = told["pe"], told["start"], told["nbytes"], told["role"]
        if type(pe) is not int or not 0 <= pe < world.config.num_pes or size != nbytes:
            raise TransportError(
                f"the peer's window must be one of {nbytes} bytes of a PE below "
                f"{world.config.num_pes}, got {size!r} of PE {pe!r}"
            )
        if start != world.name:
            raise TransportError(
                f"PE {pe} belongs to another start of NVSHMEM ({start}, this is {world.name}): "
                f"the set of PEs is fixed, so all processes must be started together"
            )
        if role == world.config.role:
            raise TransportError(f"PE {pe} is a {role} too; open its world as what it is")
        return PeersWindow(world, pe, nbytes)
    raise TransportError("what came is no window of NVSHMEM's; do both ends use this transport?")


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


class OwnWindow(_NvshmemWindow):
    """A window that one peer writes into; ``meet`` says which."""

    def __init__(self, world: NvshmemWorld, nbytes: int) -> None:
        super().__init__(world, nbytes)
        self._address = 0
        self._fd: int | None = None
        self._pid = os.getpid()

    @property
    @override
    def memory(self) -> Memory:
        if not self._address:
            raise TransportError(
                "this window has no place before the handshake has told whose it is: call "
                "pair_up(own, peers) first"
            )
        return Memory(self._address, self.nbytes, self._world)

    @property
    @override
    def fd(self) -> int:
        if self._fd is None:
            config = self._world.config
            told = {
                "pe": config.pe,
                "start": self._world.name,
                "nbytes": self.nbytes,
                "role": config.role,
            }
            self._fd = os.memfd_create("torch-eaas-nvshmem", os.MFD_CLOEXEC)
            os.write(self._fd, json.dumps(told).encode())
        return self._fd

    @override
    def close(self) -> None:
        if self._fd is not None and self._pid == os.getpid():
            os.close(self._fd)
            self._fd = None

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

    @property
    @override
    def fd(self) -> int:
        raise TransportError("a peer's window is not handed on")

    @override
    def close(self) -> None:
        pass


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
