"""The CUDA driver's calls that windows need; the one file that imports ``cuda.bindings``.

Each window is an allocation of its own, made by the driver's virtual memory functions. What is
exported and imported are references: the memory lives until the last of them is gone, whoever made
it.
"""

from __future__ import annotations

import os
import threading
import time
from importlib import import_module
from typing import Any

from torch_eaas.errors import ConfigError, TransportError

ZERO_S = 10.0
"""How long a GPU may take to zero a window that is being made."""

_ELSE = "where there is none, use transport='shared_memory'"

_ATTRIBUTES = {
    "CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING": "one address space with its host",
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "virtual memory management",
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": (
        "memory that is shared by file descriptor"
    ),
}
"""What a GPU must have."""

_NEXT_STEPS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "lower max_tokens or max_micro_batches, or free GPU memory",
    "CUDA_ERROR_NO_DEVICE": f"look at nvidia-smi and CUDA_VISIBLE_DEVICES; {_ELSE}",
    "CUDA_ERROR_INVALID_DEVICE": "choose another device, or look at CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "reboot after a driver update, or reload the driver",
    "CUDA_ERROR_INVALID_VALUE": "a window that a peer sent may be smaller than it announced",
    "CUDA_ERROR_INVALID_HANDLE": "what a peer sent may be no window in GPU memory",
    "CUDA_ERROR_NOT_SUPPORTED": "both ends must see the GPU on which a window lies",
    "CUDA_ERROR_NOT_PERMITTED": "both ends must run as one user, in containers with one GPU",
    "CUDA_ERROR_OPERATING_SYSTEM": "raise the limit of open files (ulimit -n)",
}
"""What helps, by the driver's name for an error."""


class _Busy(TransportError):
    """The GPU has not zeroed a window in time."""


class CudaDriver:
    """One GPU's memory as windows need it: made, taken in, unmapped.

    Args:
        device: The GPU, as this process numbers it.
        bindings: Stands for ``cuda.bindings.driver``; tests give one over host memory.

    Raises:
        ConfigError: There is no package, no driver, no such GPU, or it cannot share memory by
            descriptors.
    """

    def __init__(self, device: int = 0, bindings: Any = None) -> None:
        self._cuda = bindings if bindings is not None else _bindings()
        self.device = device
        self._lock = threading.Lock()
        self._context: Any = None
        self._stream: Any = None
        try:
            self._call("cuInit", 0)
            self._device = self._call("cuDeviceGet", device)
            for attribute, what in _ATTRIBUTES.items():
                key = getattr(self._cuda.CUdevice_attribute, attribute)
                if not self._call("cuDeviceGetAttribute", key, self._device):
                    raise ConfigError(
                        f"cuda_ipc needs a GPU with {what}, and GPU {device} has {attribute}=0; "
                        f"{_ELSE}"
                    )
            self._granularity: int = self._call(
                "cuMemGetAllocationGranularity", self._properties(), self._smallest
            )
        except TransportError as error:
            raise ConfigError(f"cuda_ipc cannot use GPU {device}: {error}") from error
        except RuntimeError as error:
            # the bindings look for the library at the first call
            raise ConfigError(
                f"cuda_ipc needs libcuda.so.1, which NVIDIA's driver brings ({error}); {_ELSE}"
            ) from error

    def create(self, nbytes: int) -> tuple[int, int]:
        """Return the address of new zeroed memory, and a descriptor that is a reference to it.

        Raises:
            TransportError: The driver says no; names its call, its error and the next step.
        """
        size = self._rounded(nbytes)
        handle = self._call("cuMemCreate", size, self._properties(), 0)
        try:
            address = self._map(handle, size)
            try:
                self._zero(address, size)
                fd = int(self._call("cuMemExportToShareableHandle", handle, self._by_fd, 0))
            except _Busy:
                # the GPU may yet write there
                raise
            except BaseException:
                self.unmap(address, nbytes)
                raise
        finally:
            # the mapping and the descriptor are references of their own
            self._call("cuMemRelease", handle)
        os.set_inheritable(fd, False)
        return address, fd

    def adopt(self, fd: int, nbytes: int) -> int:
        """Return the address at which the memory behind a peer's descriptor is mapped here.

        The descriptor stays the caller's. That the memory has ``nbytes`` is for the driver to see:
        it maps no more than there is.

        Raises:
            TransportError: It is no GPU memory, is smaller, or lies on a GPU without NVLink to
                this one.
        """
        handle = self._call("cuMemImportFromShareableHandle", fd, self._by_fd)
        try:
            self._check_reach(handle)
            return self._map(handle, self._rounded(nbytes))
        finally:
            self._call("cuMemRelease", handle)

    def unmap(self, address: int, nbytes: int) -> None:
        """Give up a mapping of ``nbytes``; no kernel may still use its address."""
        size = self._rounded(nbytes)
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)

    @property
    def _by_fd(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    @property
    def _smallest(self) -> Any:
        return self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granularity) * self._granularity

    def _place(self, place: Any) -> None:
        """Let a location of the driver's mean this GPU."""
        place.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = self.device

    def _properties(self) -> Any:
        """Return the driver's description of memory of this GPU that can be exported."""
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._by_fd
        self._place(properties.location)
        return properties

    def _map(self, handle: Any, size: int) -> int:
        """Map an allocation, for this GPU to read and write."""
        access = self._cuda.CUmemAccessDesc()
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._place(access.location)
        address = int(self._call("cuMemAddressReserve", size, 0, 0, 0))
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
            try:
                self._call("cuMemSetAccess", address, size, [access], 1)
            except BaseException:
                self._call("cuMemUnmap", address, size)
                raise
        except BaseException:
            self._call("cuMemAddressFree", address, size)
            raise
        return address

    def _check_reach(self, handle: Any) -> None:
        """Raise TransportError unless this GPU's atomics work on a peer's memory."""
        owner = self._call("cuMemGetAllocationPropertiesFromHandle", handle).location.id
        if owner == self.device:
            return
        key = self._cuda.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        other = self._call("cuDeviceGet", owner)
        if not self._call("cuDeviceGetP2PAttribute", key, self._device, other):
            raise TransportError(
                f"the peer's window lies on GPU {owner}, and GPU {self.device} has no NVLink to "
                f"it: words need atomics, which PCIe has not; put both ends on GPUs that "
                f"nvidia-smi topo -m joins by NV, or on one"
            )

    def _zero(self, address: int, size: int) -> None:
        """Zero memory, in a stream that waits for no other one and joins no capture."""
        with self._lock:
            if self._context is None:
                # torch's own, which lives as long as the process
                self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
            self._call("cuCtxPushCurrent", self._context)
            try:
                if self._stream is None:
                    kind = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
                    self._stream = self._call("cuStreamCreate", kind)
                self._call("cuMemsetD8Async", address, 0, size, self._stream)
                self._finish(size)
            finally:
                self._call("cuCtxPopCurrent")

    def _finish(self, size: int) -> None:
        end = time.monotonic() + ZERO_S
        while True:
            status, *_ = self._function("cuStreamQuery")(self._stream)
            if status != self._cuda.CUresult.CUDA_ERROR_NOT_READY:
                self._check("cuStreamQuery", status)
                return
            if time.monotonic() > end:
                raise _Busy(
                    f"GPU {self.device} did not zero {size} bytes within {ZERO_S:g} s; "
                    f"see what else runs on it (nvidia-smi)"
                )
            time.sleep(50e-6)

    def _function(self, name: str) -> Any:
        function = getattr(self._cuda, name, None)
        if function is None:
            raise ConfigError(
                f"cuda_ipc needs {name}, which this cuda-bindings has not; "
                f"pip install 'torch-eaas[cuda]'"
            )
        return function

    def _call(self, name: str, *args: Any) -> Any:
        """Call the driver; return what it returns beside its status.

        Raises:
            TransportError: The status is an error.
        """
        status, *values = self._function(name)(*args)
        self._check(name, status)
        return values[0] if values else None

    def _check(self, name: str, status: Any) -> None:
        if status == self._cuda.CUresult.CUDA_SUCCESS:
            return
        [_, text] = self._cuda.cuGetErrorString(status)
        what = status.name if hasattr(status, "name") else "an error"
        told = f"{name} failed: {what} ({int(status)}): {(text or b'').decode()}"
        step = _NEXT_STEPS.get(what)
        raise TransportError(f"{told}; {step}" if step else told)


def _bindings() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(
            f"cuda_ipc needs the package cuda-bindings ({error}), which torch's CUDA builds bring; "
            f"pip install 'torch-eaas[cuda]'. It is for GPUs: {_ELSE}"
        ) from error
