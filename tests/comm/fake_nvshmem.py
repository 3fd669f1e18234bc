"""NVSHMEM over host memory: stands for nvshmem4py and the CUDA package where no GPU is.

Each library has a heap of its own, as each PE has; ``reach`` translates a symmetric address of one
into an address of another's heap, as a put does.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from torch_eaas.comm.nvshmem_library import Modules

HEAP_BYTES = 1 << 20
ID_BYTES = 128


class FakeNvshmem:
    """What the packages do, and a list of the calls that were made.

    Args:
        version: The host library's.
        capability: The GPU's.
        ordering: What the GPU says of the network card's writes.
        dmabuf: Whether the driver has dma-buf.
    """

    def __init__(
        self,
        version: str = "3.6.5",
        *,
        capability: tuple[int, int] = (9, 0),
        ordering: int = 100,
        dmabuf: bool = True,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.peers: dict[int, FakeNvshmem] = {}
        """PEs whose memory stores reach."""
        self.is_idle = True
        self.status = 0
        self.init_error = ""
        self.others_came = threading.Event()
        self.others_came.set()
        self._threads: set[int] = set()
        """Threads whose current GPU this is."""
        self._memory = ctypes.create_string_buffer(HEAP_BYTES + 128)
        self.heap = -(-ctypes.addressof(self._memory) // 128) * 128
        self._used = 0
        self.version = version
        self.device = SimpleNamespace(
            compute_capability=capability,
            properties=SimpleNamespace(
                gpu_direct_rdma_writes_ordering=ordering, dma_buf_supported=dmabuf
            ),
            set_current=lambda: self._threads.add(threading.get_ident()),
            create_stream=lambda: SimpleNamespace(handle=7, record=self._record),
        )

    @property
    def modules(self) -> Modules:
        """The packages, as ``NvshmemLibrary`` takes them."""
        core = SimpleNamespace(
            get_version=lambda: SimpleNamespace(libnvshmem_version=self.version),
            get_unique_id=lambda empty=False: SimpleNamespace(
                _data=np.full(1, 0 if empty else 5, np.dtype([("internal", "u1", ID_BYTES)]))
            ),
            init=self._init,
        )
        bindings = SimpleNamespace(
            align=self._align,
            ptr=lambda address, pe: self.reach(address, self.peers[pe]) if pe in self.peers else 0,
            quiet_on_stream=self._quiet,
            cumodule_init=lambda module: self.calls.append(("module", module)) or self.status,
        )
        buffer = SimpleNamespace(from_handle=self._buffer)
        return Modules(core, bindings, SimpleNamespace(Device=self._device, Buffer=buffer))

    def reach(self, address: int, peer: FakeNvshmem) -> int:
        """Return where a symmetric address of this heap lies in a peer's."""
        return address - self.heap + peer.heap

    def _device(self, index: int) -> Any:
        self.calls.append(("device", index))
        return self.device

    def _init(self, **given: Any) -> None:
        assert threading.get_ident() in self._threads
        self.others_came.wait(5)
        uid = bytes(given.pop("uid")._data.tobytes())
        self.calls.append(("init", uid, given["rank"], given["nranks"]))
        if self.init_error:
            raise RuntimeError(self.init_error)

    def _align(self, alignment: int, nbytes: int) -> int:
        if self._used + nbytes > HEAP_BYTES:
            return 0
        self._used += -(-nbytes // alignment) * alignment
        return self.heap + self._used - -(-nbytes // alignment) * alignment

    def _buffer(self, address: int, nbytes: int) -> Any:
        def fill(value: int, stream: Any) -> None:
            assert threading.get_ident() in self._threads
            self.calls.append(("clear", address, nbytes))
            ctypes.memset(address, value, nbytes)

        return SimpleNamespace(fill=fill)

    def _quiet(self, stream: int) -> None:
        assert threading.get_ident() in self._threads
        self.calls.append(("quiet", stream))

    def _record(self) -> Any:
        return SimpleNamespace(is_done=self.is_idle)


def make_wheel(folder: Path, version: str, *names: str) -> Path:
    """Lay out files as a wheel of NVSHMEM does; return the folder of its libraries."""
    lib, include = folder / "lib", folder / "include" / "non_abi"
    lib.mkdir(parents=True)
    include.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    lines = [f"#define NVSHMEM_VENDOR_{part}_VERSION {number}" for part, number in parts]
    (include / "nvshmem_version.h").write_text("\n".join(lines))
    for name in names:
        (lib / name).write_bytes(b"BC")
    return lib
