"""CUDA's driver over host memory: stands for ``cuda.bindings.driver`` where no GPU is.

Allocations are memfds, exported handles are descriptors of them, and addresses are real, so that
processes share memory through it, and what nobody gave back shows in the counts. New memory is
full of garbage, as a GPU's is.
"""

# ruff: noqa: N802 - the names are the driver's

from __future__ import annotations

import ctypes
import itertools
import os
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from torch_eaas.comm.cuda_driver import CudaDriver
from torch_eaas.comm.cuda_ipc import CudaIpcTransport

GRANULARITY = 1 << 16
GARBAGE = b"\xab"
NAME = "fake-gpu-"

_LIBC = ctypes.CDLL(None)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NOTHING, _READ_WRITE = 0, 3
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS = 1, 2, 0x10, 0x20


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_ECC_UNCORRECTABLE = 214
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803


OK = CUresult.CUDA_SUCCESS
BAD_VALUE = CUresult.CUDA_ERROR_INVALID_VALUE


class Names:
    """An enum of the driver's; here each member is its own name."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeCuda:
    """Stands for the module.

    Args:
        num_devices: How many GPUs there are.
        lacking: Attributes that every GPU has not, and functions that the module has not.
    """

    CUresult = CUresult
    CUdevice_attribute = CUdevice_P2PAttribute = CUmemAllocationHandleType = Names()
    CUmemAllocationGranularity_flags = CUmemAllocationType = CUmemLocationType = Names()
    CUmemAccess_flags = CUstream_flags = Names()

    def __init__(self, num_devices: int = 1, lacking: Sequence[str] = ()) -> None:
        self.num_devices = num_devices
        self.lacking = lacking
        self.nvlinks: set[tuple[int, int]] = set()
        self.failing: dict[str, CUresult] = {}
        self.calls: Counter[str] = Counter()
        self.looks_until_ready = 1
        self.contexts: list[str] = []
        self._handles: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, int] = {}
        self._looks = 0
        self._numbers = itertools.count(1)

    @property
    def held(self) -> dict[str, int]:
        """How many of each nobody has given back."""
        return {
            "handles": len(self._handles),
            "reservations": len(self._reserved),
            "mappings": len(self._mapped),
        }

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return super().__getattribute__(name)
        if name in self.lacking:
            raise AttributeError(name)
        self.calls[name] += 1
        if name in self.failing:
            status = self.failing[name]
            return lambda *args: (status, None)
        return super().__getattribute__(name)

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuGetErrorString(self, status: CUresult) -> tuple[CUresult, bytes]:
        return OK, status.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()

    # -- devices -------------------------------------------------------------------------------

    def cuInit(self, flags: int) -> tuple[CUresult]:
        return (OK if self.num_devices else CUresult.CUDA_ERROR_NO_DEVICE,)

    def cuDeviceGet(self, ordinal: int) -> tuple[CUresult, int]:
        known = 0 <= ordinal < self.num_devices
        return OK if known else CUresult.CUDA_ERROR_INVALID_DEVICE, ordinal

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[CUresult, int]:
        return OK, int(attribute not in self.lacking)

    def cuDeviceGetP2PAttribute(self, attribute: str, here: int, there: int) -> Any:
        assert attribute == "CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED"
        return OK, int((here, there) in self.nvlinks)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[CUresult, str]:
        return OK, f"context {device}"

    def cuCtxPushCurrent(self, context: str) -> tuple[CUresult]:
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[CUresult, str]:
        return OK, self.contexts.pop()

    # -- streams -------------------------------------------------------------------------------

    def cuStreamCreate(self, flags: str) -> tuple[CUresult, str]:
        assert self.contexts
        assert flags == "CU_STREAM_NON_BLOCKING"
        return OK, "stream"

    def cuMemsetD8Async(self, address: int, byte: int, size: int, stream: str) -> tuple[CUresult]:
        assert self.contexts
        assert stream == "stream"
        ctypes.memset(address, byte, size)
        self._looks = self.looks_until_ready
        return (OK,)

    def cuStreamQuery(self, stream: str) -> tuple[CUresult]:
        self._looks -= 1
        return (CUresult.CUDA_ERROR_NOT_READY if self._looks > 0 else OK,)

    # -- memory --------------------------------------------------------------------------------

    def cuMemGetAllocationGranularity(self, properties: Any, option: str) -> tuple[CUresult, int]:
        return OK, GRANULARITY

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[CUresult, int]:
        assert properties.type == "CU_MEM_ALLOCATION_TYPE_PINNED"
        assert properties.requestedHandleTypes == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        assert properties.location.type == "CU_MEM_LOCATION_TYPE_DEVICE"
        if size % GRANULARITY:
            return BAD_VALUE, 0
        fd = os.memfd_create(f"{NAME}{properties.location.id}")
        os.write(fd, GARBAGE * size)
        return OK, self._handle(fd)

    def cuMemRelease(self, handle: int) -> tuple[CUresult]:
        os.close(self._handles.pop(handle))
        return (OK,)

    def cuMemExportToShareableHandle(
        self, handle: int, kind: str, flags: int
    ) -> tuple[CUresult, int]:
        assert kind == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        fd = os.dup(self._handles[handle])
        os.set_inheritable(fd, True)
        return OK, fd

    def cuMemImportFromShareableHandle(self, fd: int, kind: str) -> tuple[CUresult, int]:
        assert kind == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        if f"memfd:{NAME}" not in os.readlink(f"/proc/self/fd/{fd}"):
            return CUresult.CUDA_ERROR_INVALID_HANDLE, 0
        return OK, self._handle(os.dup(fd))

    def cuMemGetAllocationPropertiesFromHandle(self, handle: int) -> tuple[CUresult, Any]:
        name = os.readlink(f"/proc/self/fd/{self._handles[handle]}")
        device = int(name.split(NAME)[1].split()[0])
        return OK, SimpleNamespace(location=SimpleNamespace(id=device))

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:
        where = _LIBC.mmap(None, size, _NOTHING, _PRIVATE | _ANONYMOUS, -1, 0)
        self._reserved[where] = size
        return OK, where

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Any:
        fd = self._handles[handle]
        if self._reserved.get(address) != size or size > os.fstat(fd).st_size:
            return (BAD_VALUE,)
        # nobody may use it before cuMemSetAccess
        assert _LIBC.mmap(address, size, _NOTHING, _SHARED | _FIXED, fd, 0) == address
        self._mapped[address] = size
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> tuple[CUresult]:
        [one] = access
        assert one.flags == "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"
        assert one.location.type == "CU_MEM_LOCATION_TYPE_DEVICE"
        assert self._mapped[address] == size
        assert _LIBC.mprotect(address, size, _READ_WRITE) == 0
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[CUresult]:
        if self._mapped.pop(address, None) != size:
            return (BAD_VALUE,)
        flags = _PRIVATE | _ANONYMOUS | _FIXED
        assert _LIBC.mmap(address, size, _NOTHING, flags, -1, 0) == address
        return (OK,)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[CUresult]:
        if address in self._mapped or self._reserved.pop(address, None) != size:
            return (BAD_VALUE,)
        _LIBC.munmap(address, size)
        return (OK,)

    def _handle(self, fd: int) -> int:
        number = next(self._numbers)
        self._handles[number] = fd
        return number


def fake_transport(cuda: FakeCuda | None = None, device: int = 0) -> CudaIpcTransport:
    """Return a transport over a fake GPU's memory."""
    return CudaIpcTransport(driver=CudaDriver(device, cuda or FakeCuda()))
