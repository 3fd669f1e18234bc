"""CUDA IPC: client and server are processes on one host whose kernels write into GPU memory.

Windows are passed as descriptors, as those of shared memory are. A mapping is a reference of its
own: memory outlives the process that made it, also one that was killed, until nobody maps it.
What orders payload before word is the kernels' release store; the host never looks into a window.
"""

from __future__ import annotations

import logging
import os
import weakref

from typing_extensions import override

from torch_eaas.comm.cuda_driver import CudaDriver
from torch_eaas.comm.socket_transport import SocketTransport
from torch_eaas.comm.window import Memory, Window, WindowMaker, check_size
from torch_eaas.errors import TransportError

logger = logging.getLogger(__name__)


class CudaIpcTransport(SocketTransport):
    """Windows in GPU memory, control calls over a unix socket.

    For processes on one GPU, and on GPUs of one host that NVLink joins. Each end maps all windows
    of its pairs for its own GPU.

    Args:
        device: The GPU, as this process numbers it.
        driver: What calls CUDA's driver; by default the real one.

    Raises:
        ConfigError: There is no such GPU here, or it cannot share memory; names what is missing.
    """

    def __init__(self, device: int = 0, *, driver: CudaDriver | None = None) -> None:
        super().__init__(CudaWindows(driver or CudaDriver(device)))


class CudaWindows(WindowMaker):
    """Windows in the memory of a GPU, and of those that it reaches.

    A window's memory is unmapped when its last ``Memory`` goes: no kernel may use it then.

    Args:
        driver: What calls CUDA's driver.
    """

    name = "cuda_ipc"

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    @override
    def create(self, nbytes: int) -> Window:
        check_size(nbytes)
        address, fd = self._driver.create(nbytes)
        return CudaWindow(_Mapping(self._driver, address, nbytes), fd)

    @override
    def adopt(self, fd: int, nbytes: int) -> Window:
        try:
            if type(nbytes) is not int or nbytes < 1:
                raise TransportError(
                    f"the peer's window must have a positive number of bytes, got {nbytes!r}"
                )
            address = self._driver.adopt(fd, nbytes)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, TransportError):
                raise TransportError(f"cannot map the peer's window: {error}") from error
            raise
        return CudaWindow(_Mapping(self._driver, address, nbytes), fd)


class _Mapping:
    """GPU memory that stays mapped as long as somebody holds this."""

    def __init__(self, driver: CudaDriver, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        # the process's end unmaps everything anyway, and threads may be waiting for kernels then
        weakref.finalize(self, _unmap, driver, address, nbytes, os.getpid()).atexit = False


def _unmap(driver: CudaDriver, address: int, nbytes: int, pid: int) -> None:
    if pid != os.getpid():
        return
    try:
        driver.unmap(address, nbytes)
    except TransportError as error:
        logger.warning("a window of %d bytes stays mapped: %s", nbytes, error)


class CudaWindow(Window):
    """A window in GPU memory, for kernels alone.

    Args:
        mapping: Where it is mapped.
        fd: The memory's file descriptor, which this window then owns.
    """

    def __init__(self, mapping: _Mapping, fd: int) -> None:
        self._mapping: _Mapping | None = mapping
        self._fd: int | None = fd
        self._pid = os.getpid()
        self.nbytes = mapping.nbytes

    @property
    @override
    def view(self) -> memoryview:
        raise TransportError(
            "this window lies in GPU memory, where the host reads nothing: take window.memory, or "
            "use DeviceClient and DeviceServer; Client and ExpertServer go with shared_memory"
        )

    @property
    @override
    def memory(self) -> Memory:
        if self._mapping is None:
            raise TransportError("this window is closed")
        return Memory(self._mapping.address, self.nbytes, self._mapping)

    @property
    @override
    def fd(self) -> int:
        if self._fd is None:
            raise TransportError("this window has no file descriptor to hand on")
        return self._fd

    @override
    def close(self) -> None:
        if self._pid != os.getpid():
            return
        self._mapping = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
