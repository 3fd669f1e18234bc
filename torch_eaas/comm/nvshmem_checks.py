"""What NVSHMEM needs of a machine and of its own parts, checked before it starts.

NVSHMEM aborts the process where something is missing, or waits for ever; these say what and why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from torch_eaas.errors import ConfigError

Version = tuple[int, int, int]

IBGDA_SINCE: Version = (3, 5, 0)
"""Before, the device library has no way to the network card but through a thread of the host."""

WRITES_ORDERED_FOR_OWNER = 100
"""CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER."""

INSTALL = "pip install nvshmem4py-cu13 'nvidia-nvshmem-cu13>=3.5,<3.7'"

_PEERMEM = (
    "module/nvidia_peermem/version",
    "kernel/mm/memory_peers/nvidia-peermem/version",
    "kernel/mm/memory_peers/nv_mem/version",
)
_VERSION = re.compile(r"define NVSHMEM_VENDOR_(MAJOR|MINOR|PATCH)_VERSION (\d+)")


def wheel_folders() -> list[Path]:
    """Return where wheels of NVSHMEM put its libraries, without importing anything."""
    spec = PathFinder.find_spec("nvidia")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    return [Path(place, "nvshmem", "lib") for place in places]


def find_bitcode(capability: int, folders: Iterable[Path] | None = None) -> Path:
    """Return the device library that kernels of a GPU are linked with.

    Up to 3.6 one file serves all GPUs; from 3.7 each architecture has its own.

    Args:
        capability: 90 for an H100, 100 for a B200.
        folders: Where to look; by default in the wheels of this Python.

    Raises:
        ConfigError: There is none, or none for this GPU.
    """
    looked = list(wheel_folders() if folders is None else folders)
    for folder in looked:
        for name in (f"libnvshmem_device_sm_{capability}.bc", "libnvshmem_device.bc"):
            if (folder / name).is_file():
                return folder / name
    others = sorted(f.name for folder in looked for f in folder.glob("libnvshmem_device*.bc"))
    if others:
        raise ConfigError(
            f"NVSHMEM's device library for sm_{capability} is missing, there is only "
            f"{', '.join(others)}; {INSTALL}"
        )
    where = ", ".join(map(str, looked)) or "no wheel of it"
    raise ConfigError(f"NVSHMEM's device library is in none of: {where}; {INSTALL}")


def version_of(bitcode: Path) -> Version | None:
    """Return the version of the NVSHMEM that a device library came with, None if it is not told."""
    header = bitcode.parent.parent / "include" / "non_abi" / "nvshmem_version.h"
    try:
        found = dict(_VERSION.findall(header.read_text()))
        return int(found["MAJOR"]), int(found["MINOR"]), int(found["PATCH"])
    except (OSError, KeyError):
        return None


def check_versions(host: Version, bitcode: Path, *, ibgda: bool) -> None:
    """Refuse parts of NVSHMEM that do not go together.

    Args:
        host: The version of the host library that was loaded.
        bitcode: The device library that kernels are linked with.
        ibgda: Whether kernels are to reach the network card themselves.

    Raises:
        ConfigError: They are of different versions, or too old for what is asked.
    """
    device = version_of(bitcode)
    if device is not None and device != host:
        raise ConfigError(
            f"NVSHMEM's host library is {_text(host)} and its device library {bitcode} is "
            f"{_text(device)}: they must be of one version; torch may have brought one of them; "
            f"pip install --no-deps nvidia-nvshmem-cu13=={_text(max(host, device))}"
        )
    if ibgda and host < IBGDA_SINCE:
        raise ConfigError(
            f"ibgda=True needs an NVSHMEM of at least {_text(IBGDA_SINCE)} and this is "
            f"{_text(host)}, whose device library reaches the network card through the host only; "
            f"pip install --no-deps nvidia-nvshmem-cu13==3.6.5, over what torch pins"
        )


def check_ordering(ordering: int) -> None:
    """Refuse a GPU in which a word could become visible before its payload.

    What comes over the network is written by the network card. Kernels wait for a word with plain
    acquire loads, which is enough only where the GPU keeps such writes in order.

    Args:
        ordering: CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING.

    Raises:
        ConfigError: It does not.
    """
    if ordering < WRITES_ORDERED_FOR_OWNER:
        raise ConfigError(
            f"this GPU does not keep the network card's writes in order: "
            f"GPU_DIRECT_RDMA_WRITES_ORDERING is {ordering}, at least "
            f"{WRITES_ORDERED_FOR_OWNER} is needed; use cuda_ipc within the host"
        )


def check_registration(dmabuf: bool, sysfs: Path = Path("/sys")) -> None:
    """Refuse a machine whose network card cannot be given the GPU's memory.

    Args:
        dmabuf: CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED.
        sysfs: Where the kernel tells of its modules.

    Raises:
        ConfigError: Neither dma-buf nor nvidia_peermem is there.
    """
    if not dmabuf and not any((sysfs / name).exists() for name in _PEERMEM):
        raise ConfigError(
            "the network card cannot be given the GPU's memory: the driver has no dma-buf and "
            "the module nvidia_peermem is not loaded; modprobe nvidia_peermem, or use the open "
            "kernel driver; within one host leave ibgda=False"
        )


def _text(version: Version) -> str:
    return ".".join(map(str, version))
