"""NVSHMEM's host library; the one file that imports nvshmem4py, and the CUDA package it brings."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch_eaas.comm.nvshmem_checks import (
    INSTALL,
    Version,
    check_ordering,
    check_registration,
    check_versions,
    find_bitcode,
)
from torch_eaas.errors import ConfigError, PeerTimeout, TransportError
from torch_eaas.protocol.layout import ALIGN

_IBGDA = "NVSHMEM_IB_ENABLE_IBGDA"
_NO_DATA_DIRECT = "NVSHMEM_DISABLE_DATA_DIRECT"
_LOOK_S = 1e-3


@dataclass(frozen=True)
class Modules:
    """What of nvshmem4py and of the CUDA package is called."""

    core: Any
    """``nvshmem.core``."""
    bindings: Any
    """``nvshmem.bindings``."""
    cuda: Any
    """``cuda.core``."""


class NvshmemLibrary:
    """NVSHMEM in this process, on one GPU. Before ``start`` nothing of it runs.

    Whichever thread calls it has that GPU for its current one afterwards.

    Args:
        device: The GPU's number.
        ibgda: Whether kernels are to reach the network card themselves.
        modules: The packages; by default the installed ones.

    Raises:
        ConfigError: A package, the driver, a file or a property of the machine is missing; the
            message says which, and what to do.
    """

    def __init__(self, device: int, *, ibgda: bool, modules: Modules | None = None) -> None:
        self._modules = modules or _import()
        try:
            self._device = self._modules.cuda.Device(device)
            self._device.set_current()
            properties = self._device.properties
            major, minor = self._device.compute_capability
            self._ordering = int(properties.gpu_direct_rdma_writes_ordering)
            dmabuf = bool(properties.dma_buf_supported)
        except RuntimeError as error:
            raise ConfigError(
                f"NVSHMEM needs GPU {device} and its driver (libcuda.so.1): {error}; "
                f"install the driver, or start the container with --gpus"
            ) from error
        self.bitcode = find_bitcode(10 * major + minor)
        check_versions(self.version, self.bitcode, ibgda=ibgda)
        if ibgda:
            check_ordering(self._ordering)
            check_registration(dmabuf)
        self._ibgda = ibgda
        self._stream: Any = None

    @property
    def version(self) -> Version:
        """The host library's version."""
        text = self._modules.core.get_version().libnvshmem_version
        major, minor, patch = (int(part) for part in text.split(".")[:3])
        return major, minor, patch

    def new_id(self) -> bytes:
        """Return an id under which processes start together; PE 0 makes it."""
        return bytes(self._modules.core.get_unique_id()._data.tobytes())

    def start(self, unique_id: bytes, pe: int, num_pes: int, timeout_s: float) -> None:
        """Start together with all others; returns once all have come.

        Raises:
            ConfigError: NVSHMEM did not start; the message is its own.
            PeerTimeout: Not all have come in time. NVSHMEM still waits then: end this process.
        """
        # read by NVSHMEM alone; what it puts through a data-direct card needs its own waits
        os.environ[_IBGDA] = "1" if self._ibgda else "0"
        os.environ[_NO_DATA_DIRECT] = "1"
        given = self._id_of(unique_id)
        failures: list[Exception] = []
        # it waits for ever for one who does not come
        thread = threading.Thread(
            target=self._init, args=(given, pe, num_pes, failures), name="eaas-nvshmem", daemon=True
        )
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            raise PeerTimeout(
                f"PE {pe} waited {timeout_s:g} s for all {num_pes} PEs to start, and one has not "
                f"come: look at their logs, and start all of them again"
            )
        if failures:
            raise ConfigError(
                f"PE {pe} of {num_pes}: NVSHMEM did not start: {failures[0]}; "
                f"NVSHMEM_DEBUG=INFO tells more"
            ) from failures[0]
        self._device.set_current()
        self._stream = self._device.create_stream()

    def allocate(self, nbytes: int) -> int:
        """Return the address of symmetric memory; all PEs call it, with the same size.

        Raises:
            ConfigError: There is not enough.
        """
        self._device.set_current()
        address = int(self._modules.bindings.align(ALIGN, nbytes))
        if not address:
            raise ConfigError(
                f"NVSHMEM has no {nbytes / 2**20:.1f} MiB of symmetric memory left; raise "
                f"NVSHMEM_SYMMETRIC_SIZE, or lower max_tokens or the number of PEs"
            )
        return address

    def direct(self, address: int, pe: int) -> int:
        """Return where stores of this GPU reach a PE's memory, or 0 where only puts do.

        Raises:
            ConfigError: Only puts would, and what they write here would not be in order.
        """
        mapped = int(self._modules.bindings.ptr(address, pe))
        if not mapped:
            check_ordering(self._ordering)
        return mapped

    def settle(self, timeout_s: float) -> None:
        """Wait until all that this PE has put so far lies in its peers' memory.

        Raises:
            PeerTimeout: It does not: a PE is gone or its network is.
        """
        # handshakes are answered by threads that CUDA knows nothing of
        self._device.set_current()
        self._modules.bindings.quiet_on_stream(int(self._stream.handle))
        self._finish("what this PE has put has not arrived", timeout_s)

    def clear(self, address: int, nbytes: int, timeout_s: float) -> None:
        """Zero some of this PE's memory."""
        self._device.set_current()
        self._modules.cuda.Buffer.from_handle(address, nbytes).fill(0, stream=self._stream)
        self._finish("memory was not cleared", timeout_s)

    def register(self, module: int) -> None:
        """Tell NVSHMEM of a loaded kernel, before it is launched for the first time.

        Raises:
            TransportError: NVSHMEM refuses it: its device library is of another version.
        """
        self._device.set_current()
        status = self._modules.bindings.cumodule_init(module)
        if status:
            raise TransportError(
                f"NVSHMEM refused a kernel's module with status {status}: was it linked with "
                f"{self.bitcode}?"
            )

    def _id_of(self, unique_id: bytes) -> Any:
        given = self._modules.core.get_unique_id(empty=True)
        if len(unique_id) != given._data.nbytes:
            raise ConfigError(
                f"NVSHMEM's id has {given._data.nbytes} bytes, PE 0 left {len(unique_id)}: "
                f"all PEs need the same version of nvidia-nvshmem"
            )
        given._data.view("u1")[:] = memoryview(unique_id)
        return given

    def _init(self, given: Any, pe: int, num_pes: int, failures: list[Exception]) -> None:
        try:
            self._device.set_current()
            self._modules.core.init(
                device=self._device, uid=given, rank=pe, nranks=num_pes, initializer_method="uid"
            )
        except Exception as error:
            failures.append(error)

    def _finish(self, what: str, timeout_s: float) -> None:
        event = self._stream.record()
        deadline = time.monotonic() + timeout_s
        while not event.is_done:
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"{what} within {timeout_s:g} s; when a PE dies its peers cannot go on: "
                    f"start all of them again"
                )
            time.sleep(_LOOK_S)


def _import() -> Modules:
    try:
        return Modules(*map(import_module, ("nvshmem.core", "nvshmem.bindings", "cuda.core")))
    except ImportError as error:
        raise ConfigError(f"the nvshmem transport needs nvshmem4py ({error}); {INSTALL}") from error
