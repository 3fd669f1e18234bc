"""Windows: memory of one process that one peer may write into."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from torch_eaas.errors import ConfigError, TransportError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A window's memory where this process or its GPU has it mapped, as long as this lives."""

    address: int
    """Where it begins, a multiple of 128: what the table of pairs tells the kernels."""

    nbytes: int

    owner: object
    """What keeps it mapped."""


class Window(Protocol):
    """A piece of memory that both ends of a pair have mapped.

    The memory lives until the last view or ``Memory`` of it is gone in both processes. A forked
    child owns none: ``close`` does nothing there.
    """

    nbytes: int
    """Its size, as it was asked for."""

    @property
    def view(self) -> memoryview:
        """The window's bytes, writable; TransportError where the host does not reach them."""
        ...

    @property
    def memory(self) -> Memory:
        """The window's memory by address, as kernels take it; it stays mapped after ``close``."""
        ...

    @property
    def fd(self) -> int:
        """The file descriptor to hand to the peer."""
        ...

    def close(self) -> None:
        """Give the window up; safe twice. Views and memories taken from it stay valid."""
        ...


class WindowMaker(Protocol):
    """How a transport makes windows, and takes in those that a peer sends."""

    name: str
    """The transport's name: two ends must mean the same by a window."""

    in_words: bool = False
    """Whether a frame alone tells of a window; else a descriptor goes beside it, in one host."""

    def create(self, nbytes: int) -> Window:
        """Return a new zeroed window that can be handed on."""
        ...

    def tell(self, window: Window) -> Any:
        """Return what a frame says of a window, as JSON."""
        return window.nbytes

    def adopt(self, fd: int, told: Any) -> Window:
        """Return the window that a peer's frame told of.

        ``fd`` is its descriptor (-1 where it comes in words), which is closed with it, and on any
        fault.
        """
        ...


class HostWindow(Window):
    """A window in this host's memory.

    Args:
        memory: The mapping.
        fd: The memory's file descriptor, which this window then owns; None within one process.
    """

    def __init__(self, memory: mmap.mmap, fd: int | None = None) -> None:
        self._memory: mmap.mmap | None = memory
        self._fd = fd
        self._pid = os.getpid()
        self.nbytes = len(memory)

    @property
    @override
    def view(self) -> memoryview:
        if self._memory is None:
            raise TransportError("this window is closed")
        return memoryview(self._memory)

    @property
    @override
    def memory(self) -> Memory:
        mapped = (ctypes.c_char * self.nbytes).from_buffer(self.view)
        return Memory(ctypes.addressof(mapped), self.nbytes, mapped)

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
        self._memory = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def local_window(nbytes: int) -> Window:
    """Return a window for threads of this process."""
    check_memory(nbytes)
    return HostWindow(mmap.mmap(-1, nbytes))


def create_window(nbytes: int, name: str = "torch-eaas-window") -> Window:
    """Return a window of anonymous memory whose descriptor can be handed to another process.

    The memory has no name, is sealed against every change of size, and all its pages exist, so
    neither a peer nor a full machine can turn a later access into a bus error.

    Raises:
        TransportError: There is not enough memory; the text says need, have and what to do.
    """
    check_memory(nbytes)
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return HostWindow(mmap.mmap(fd, nbytes), fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise TransportError(f"cannot make a window of {nbytes} bytes: {error}") from error


def adopt_window(fd: int, nbytes: int) -> Window:
    """Return the window behind a descriptor that a peer sent; the window owns the descriptor.

    Raises:
        TransportError: The memory is not sealed, cannot be mapped, or has another size than was
            agreed.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        os.close(fd)
        raise TransportError(f"the peer's window is not a memfd: {error}") from error
    if seals & _SEALS != _SEALS or size != nbytes:
        os.close(fd)
        raise TransportError(
            f"the peer's window must be sealed and have {nbytes} bytes, "
            f"got seals {seals:#x} and {size} bytes"
        )
    try:
        return HostWindow(mmap.mmap(fd, size), fd)
    except (OSError, ValueError) as error:
        os.close(fd)
        raise TransportError(f"cannot map the peer's window of {size} bytes: {error}") from error


def check_size(nbytes: int) -> None:
    """Raise ConfigError unless a window may have ``nbytes``."""
    if nbytes < 1:
        raise ConfigError(f"a window has at least one byte, got {nbytes}")


def check_memory(nbytes: int) -> None:
    """Raise TransportError unless this process may take ``nbytes`` more memory."""
    check_size(nbytes)
    for have, what in ((_available_bytes(), "the machine"), (_cgroup_bytes(), "this cgroup")):
        if have is not None and nbytes > have:
            raise TransportError(
                f"a window needs {nbytes / 2**20:.1f} MiB and {what} has {have / 2**20:.1f} MiB "
                f"left; lower max_tokens or max_micro_batches, or free memory"
            )


def _available_bytes() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what the tightest memory limit above this process leaves, or None without one."""
    left: int | None = None
    for line in _lines(Path("/proc/self/cgroup")):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, limit_name, used_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "memory"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            folder = base.joinpath(*parts[:depth])
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                room = max(0, limit - used + _reclaimable(folder))
                left = room if left is None else min(left, room)
    return left


def _reclaimable(folder: Path) -> int:
    """Return the bytes of page cache that the kernel would drop before it refuses memory."""
    for line in _lines(folder / "memory.stat"):
        if line.startswith(("inactive_file ", "total_inactive_file ")):
            return int(line.split()[1])
    return 0


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
