"""Which transport two ends take: by its name, or the best that this machine can.

Two processes choose alike where they are asked alike; where they do not, the handshake says so.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_eaas.comm.cuda_driver import CudaDriver
from torch_eaas.comm.cuda_ipc import CudaIpcTransport
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.errors import ConfigError

AUTO = "auto"

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")

HOST_MEMORY = "kernels do not reach its windows, which lie in the host's memory"
ONE_OBJECT = "for threads of this process that are given this very object"
NO_NVSHMEM = (
    "its processes start together: open one NvshmemWorld in each (NvshmemWorld.open) and give "
    "NvshmemTransport(world); see docs/nvshmem.md"
)
FIXED_PES = (
    "when a PE dies invariants 1, 3 and 4 do not hold, and access cannot be revoked; "
    "see docs/transports.md"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One transport as ``choose_transport`` knows it; its functions are given the device."""

    name: str
    """What users call it."""

    why_not: Callable[[str], str | None]
    """Says why it is not possible here; None if it is."""

    make: Callable[[str], Transport]
    """Makes it."""

    caveat: Callable[[str], str]
    """Says what does not hold with it; empty if nothing."""

    reaches_gpu: bool
    """Whether kernels read and write its windows."""


def choose_transport(
    name: str = AUTO, *, device: str = "cpu", candidates: Sequence[Candidate] | None = None
) -> Transport:
    """Return a transport, and log which one, why no other, and what does not hold with it.

    Args:
        name: ``"auto"`` for the first of the candidates that is possible, or one's name.
        device: Where windows are read and written: ``"cpu"``, or the GPU whose kernels do it,
            ``"cuda"`` (which is ``"cuda:0"``) or ``"cuda:N"``.
        candidates: What there is to choose from, the best first; by default ``CANDIDATES``.

    Raises:
        ConfigError: There is no such transport or device, or it is not possible here; says why.
    """
    known = CANDIDATES if candidates is None else candidates
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"device must be cpu, cuda or cuda:N, got {device!r}")
    names = (AUTO, *(candidate.name for candidate in known))
    if name not in names:
        raise ConfigError(
            f"transport for device {device} must be one of {', '.join(names)}, got {name!r}"
        )
    asked = [candidate for candidate in known if name in (AUTO, candidate.name)]
    reasons = {candidate.name: candidate.why_not(device) for candidate in asked}
    picked = next((each for each in asked if reasons[each.name] is None), None)
    others = [
        f"{each}: {reason or 'possible, but further down the list'}"
        for each, reason in reasons.items()
        if picked is None or each != picked.name
    ]
    if picked is None:
        what = "no transport is" if name == AUTO else f"transport {name!r} is not"
        raise ConfigError(f"{what} possible for device {device}: {'; '.join(others)}")
    caveat = picked.caveat(device)
    logger.info(
        "transport %s for device %s%s%s",
        picked.name,
        device,
        f" ({caveat})" if caveat else "",
        "".join(f"; not {other}" for other in others),
    )
    return picked.make(device)


def transport_of(given: Transport | str, *, device: str = "cpu") -> Transport:
    """Return the transport of a client or server that was given one, or the name of one.

    Args:
        given: The transport, or what ``choose_transport`` calls it.
        device: Where this end reads and writes windows.

    Raises:
        ConfigError: It cannot be this end's; says why and what can.
    """
    is_for_gpu = device != "cpu"
    if not isinstance(given, str):
        if is_for_gpu and isinstance(given, SharedMemoryTransport | LoopbackTransport):
            raise ConfigError(
                f"kernels of {device} do not reach the windows of {type(given).__name__}; "
                f"use CudaIpcTransport, transport='cuda_ipc' or 'auto'"
            )
        return given
    if given == "loopback":
        raise ConfigError(
            "loopback joins those that are given one object: make one LoopbackTransport() and "
            "give it to both ends, or use transport='auto' for processes"
        )
    # an end that is given a name shares no object with anybody
    candidates = [
        candidate
        for candidate in CANDIDATES
        if candidate.name != "loopback" and (candidate.reaches_gpu or not is_for_gpu)
    ]
    return choose_transport(given, device=device, candidates=candidates)


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _why_no_cuda_ipc(device: str) -> str | None:
    if device == "cpu":
        return "its windows lie in a GPU's memory, and this end is on the CPU"
    try:
        CudaDriver(_index(device))
    except ConfigError as error:
        return str(error)
    return None


def _why_no_shared_memory(device: str) -> str | None:
    try:
        SharedMemoryTransport()
    except ConfigError as error:
        return str(error)
    return None


def _make_nvshmem(device: str) -> Transport:
    raise ConfigError(f"transport 'nvshmem': {NO_NVSHMEM}")


CANDIDATES = (
    Candidate(
        name="cuda_ipc",
        why_not=_why_no_cuda_ipc,
        make=lambda device: CudaIpcTransport(_index(device)),
        caveat=lambda device: "",
        reaches_gpu=True,
    ),
    Candidate(
        name="nvshmem",
        why_not=lambda device: NO_NVSHMEM,
        make=_make_nvshmem,
        caveat=lambda device: FIXED_PES,
        reaches_gpu=True,
    ),
    Candidate(
        name="shared_memory",
        why_not=_why_no_shared_memory,
        make=lambda device: SharedMemoryTransport(),
        caveat=lambda device: "" if device == "cpu" else HOST_MEMORY,
        reaches_gpu=False,
    ),
    Candidate(
        name="loopback",
        why_not=lambda device: None,
        make=lambda device: LoopbackTransport(),
        caveat=lambda device: ONE_OBJECT if device == "cpu" else f"{ONE_OBJECT}; {HOST_MEMORY}",
        reaches_gpu=False,
    ),
)
"""What there is to choose from, the best first."""

BETWEEN_PROCESSES = (AUTO, *(each.name for each in CANDIDATES if each.name != "loopback"))
"""What may be asked for by name where client and server share no object."""
