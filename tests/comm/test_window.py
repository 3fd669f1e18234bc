"""Windows of shared memory: sealed, checked against free memory first, of no name."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_eaas.comm import window as window_module
from torch_eaas.comm.window import adopt_window, check_memory, create_window, local_window
from torch_eaas.errors import ConfigError, TransportError

MIB = 2**20
SHRINK, GROW, SEAL, WRITE = (
    fcntl.F_SEAL_SHRINK,
    fcntl.F_SEAL_GROW,
    fcntl.F_SEAL_SEAL,
    fcntl.F_SEAL_WRITE,
)


def memfd(nbytes: int, seals: int) -> int:
    """Return a memfd made by hand."""
    fd = os.memfd_create("by-hand", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


# -- made here ---------------------------------------------------------------------------------


def test_nobody_can_change_the_size_of_a_window() -> None:
    window = create_window(8192)
    window.view[8191:] = b"x"
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(window.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(window.fd, fcntl.F_ADD_SEALS, WRITE)
    assert os.fstat(window.fd).st_size == 8192
    assert bytes(window.view[8191:]) == b"x"
    window.close()


def test_all_pages_of_a_window_exist_from_the_start() -> None:
    window = create_window(MIB)
    assert os.fstat(window.fd).st_blocks * 512 >= MIB
    window.close()


def test_a_window_is_inherited_by_no_program_that_is_started() -> None:
    window = create_window(8)
    assert not os.get_inheritable(window.fd)
    window.close()


def test_closing_a_window_closes_its_descriptor_once() -> None:
    window = create_window(8)
    fd = window.fd
    window.close()
    assert not is_open(fd)
    # the number may be somebody else's by now
    other = memfd(8, 0)
    window.close()
    assert is_open(other)
    os.close(other)
    with pytest.raises(TransportError, match="no file descriptor to hand on"):
        _ = window.fd


def test_a_forked_child_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    window = create_window(8)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    window.close()
    monkeypatch.undo()
    assert is_open(window.fd)
    assert len(window.view) == 8
    window.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_a_machine_that_has_no_memory_after_all_gives_an_error_and_keeps_nothing(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def fail(fd: int, offset: int, length: int) -> None:
        made.append(fd)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(TransportError, match=r"cannot make a window of 4096 bytes: .*Errno"):
        create_window(4096)
    assert not is_open(made[0])


# -- sent by a peer ----------------------------------------------------------------------------


def test_a_sealed_window_of_the_agreed_size_is_mapped() -> None:
    window = create_window(4096)
    other = adopt_window(os.dup(window.fd), 4096)
    window.view[10:12] = b"ab"
    assert bytes(other.view[10:12]) == b"ab"
    window.close()
    other.close()


@pytest.mark.parametrize(
    ("seals", "size", "message"),
    [
        pytest.param(0, 4096, "must be sealed and have 4096 bytes, got seals 0x0", id="unsealed"),
        pytest.param(GROW | SEAL, 4096, "got seals 0x5", id="may shrink"),
        pytest.param(SHRINK | SEAL, 4096, "got seals 0x3", id="may grow"),
        pytest.param(SHRINK | GROW, 4096, "got seals 0x6", id="seals may be added"),
        pytest.param(SHRINK | GROW | SEAL, 4095, "and 4095 bytes", id="too small"),
        pytest.param(SHRINK | GROW | SEAL, 8192, "and 8192 bytes", id="too large"),
        pytest.param(SHRINK | GROW | SEAL, 0, "and 0 bytes", id="empty"),
        pytest.param(
            WRITE | SHRINK | GROW | SEAL, 4096, "cannot map the peer's window", id="read-only"
        ),
    ],
)
def test_a_window_that_could_hurt_its_reader_is_refused_and_closed(
    seals: int, size: int, message: str
) -> None:
    fd = memfd(size, seals)
    with pytest.raises(TransportError, match=message):
        adopt_window(fd, 4096)
    assert not is_open(fd)


@pytest.mark.parametrize("nbytes", ["4096", None, [4096], 0], ids=str)
def test_a_size_that_is_no_positive_number_is_refused(nbytes: int) -> None:
    fd = memfd(0 if nbytes == 0 else 4096, SHRINK | GROW | SEAL)
    with pytest.raises(TransportError, match="the peer's window"):
        adopt_window(fd, nbytes)
    assert not is_open(fd)


def test_a_size_that_only_equals_a_number_does_no_harm() -> None:
    fd = memfd(4096, SHRINK | GROW | SEAL)
    window = adopt_window(fd, 4096.0)  # type: ignore[arg-type]  # as JSON may bring it
    assert window.nbytes == 4096
    window.close()


@pytest.mark.parametrize("make", ["pipe", "file"])
def test_what_is_no_memfd_is_refused_and_closed(make: str, tmp_path: Path) -> None:
    if make == "pipe":
        fd, other = os.pipe()
    else:
        fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
        other = os.dup(fd)
        os.ftruncate(fd, 4096)
    with pytest.raises(TransportError, match=r"not a memfd|must be sealed"):
        adopt_window(fd, 4096)
    assert not is_open(fd)
    os.close(other)


# -- memory ------------------------------------------------------------------------------------

Fake = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Plan what the kernel says of memory."""

    def plan(available: int = 10**6 * MIB, cgroup: str = "", **files: str) -> None:
        real = window_module._lines
        planned = {
            "/proc/meminfo": [f"MemAvailable: {available // 1024} kB"],
            "/proc/self/cgroup": cgroup.splitlines(),
        }
        monkeypatch.setattr(
            window_module, "_lines", lambda path: planned.get(str(path)) or real(path)
        )
        cgroup_bytes = window_module._cgroup_bytes
        monkeypatch.setattr(window_module, "_cgroup_bytes", lambda: cgroup_bytes(tmp_path))
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return plan


@pytest.mark.parametrize("make", [create_window, local_window, check_memory])
def test_a_window_larger_than_free_memory_is_refused_with_need_have_and_what_to_do(
    make: Callable[[int], object], machine: Fake
) -> None:
    machine(available=3 * MIB)
    with pytest.raises(
        TransportError,
        match=r"needs 3\.5 MiB and the machine has 3\.0 MiB left; "
        r"lower max_tokens or max_micro_batches, or free memory",
    ):
        make(3 * MIB + MIB // 2)
    make(3 * MIB)


V2 = "0::/user/job"
V1 = "9:name=systemd:/\n4:memory:/user/job\n1:cpu,cpuacct:/elsewhere"


@pytest.mark.parametrize(
    ("cgroup", "files", "left_mib"),
    [
        pytest.param("", {}, None, id="no cgroup"),
        pytest.param(V2, {"user__job__memory_dot_max": "max\n"}, None, id="v2 without a limit"),
        pytest.param(
            V2,
            {
                "user__job__memory_dot_max": f"{50 * MIB}\n",
                "user__job__memory_dot_current": f"{30 * MIB}\n",
            },
            20,
            id="v2",
        ),
        pytest.param(
            V2,
            {
                "user__job__memory_dot_max": f"{50 * MIB}\n",
                "user__job__memory_dot_current": f"{30 * MIB}\n",
                "user__job__memory_dot_stat": f"anon 1\ninactive_file {4 * MIB}\n",
            },
            24,
            id="v2 with page cache to drop",
        ),
        pytest.param(
            V2,
            {
                "user__memory_dot_max": f"{40 * MIB}\n",
                "user__memory_dot_current": f"{35 * MIB}\n",
                "user__job__memory_dot_max": f"{50 * MIB}\n",
                "user__job__memory_dot_current": f"{30 * MIB}\n",
            },
            5,
            id="v2 with a tighter parent",
        ),
        pytest.param(
            V2,
            {"memory_dot_max": f"{7 * MIB}\n", "memory_dot_current": f"{MIB}\n"},
            6,
            id="v2 in a container that sees only its own root",
        ),
        pytest.param(
            V1,
            {
                "memory__user__job__memory_dot_limit_in_bytes": f"{50 * MIB}\n",
                "memory__user__job__memory_dot_usage_in_bytes": f"{47 * MIB}\n",
                "memory__user__job__memory_dot_stat": (
                    f"cache 9\ninactive_file {8 * MIB}\ntotal_inactive_file {8 * MIB}\n"
                ),
            },
            11,
            id="v1",
        ),
        pytest.param(
            V1,
            {
                "memory__memory_dot_limit_in_bytes": f"{50 * MIB}\n",
                "memory__memory_dot_usage_in_bytes": f"{70 * MIB}\n",
            },
            0,
            id="v1 over its limit",
        ),
    ],
)
def test_the_tightest_cgroup_limit_above_this_process_counts(
    cgroup: str, files: dict[str, str], left_mib: int | None, machine: Fake
) -> None:
    machine(cgroup=cgroup, **files)
    if left_mib is None:
        check_memory(1000 * MIB)
        return
    if left_mib:
        check_memory(left_mib * MIB)
    with pytest.raises(
        TransportError, match=rf"this cgroup has {left_mib}\.0 MiB left; lower max_tokens"
    ):
        check_memory(left_mib * MIB + 1)


def test_a_machine_that_says_nothing_of_memory_is_believed_to_have_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window_module, "_lines", lambda path: [])
    check_memory(10**15)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_window_has_at_least_one_byte(nbytes: int) -> None:
    with pytest.raises(ConfigError, match=f"at least one byte, got {nbytes}"):
        create_window(nbytes)


def test_a_windows_memory_goes_when_its_last_view_goes() -> None:
    window = create_window(MIB)
    fd = os.dup(window.fd)
    inode = os.fstat(fd).st_ino
    view = window.view
    window.close()

    def is_mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return any(f" {inode} " in line and "torch-eaas" in line for line in lines)

    assert is_mapped()
    view.release()
    del view
    assert not is_mapped()
    os.close(fd)


def test_a_window_is_an_ordinary_map_that_numpy_and_torch_can_share() -> None:
    window = create_window(4096)
    assert isinstance(window.view.obj, mmap.mmap)
    assert not window.view.readonly
    window.close()


def test_kernels_find_a_windows_bytes_at_its_address_also_after_it_is_closed() -> None:
    window = create_window(4096)
    memory = window.memory
    assert (memory.address % 128, memory.nbytes) == (0, 4096)
    window.view[17] = 5
    window.close()
    assert ctypes.c_uint8.from_address(memory.address + 17).value == 5
