"""CUDA IPC keeps the contract, over a driver whose GPU memory is this host's."""

from __future__ import annotations

import gc
import logging
import os
import socket

import pytest
from typing_extensions import override

from tests.comm.fake_cuda import GRANULARITY, CUresult, FakeCuda, fake_transport
from tests.comm.test_shared_memory import needs_x86
from tests.comm.transport_contract import TIMEOUT_S, PlannedHandler, mapped
from tests.comm.unix_contract import UnixTransportContract
from torch_eaas.comm.cuda_driver import CudaDriver
from torch_eaas.comm.cuda_ipc import CudaWindows
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Listener, Transport
from torch_eaas.comm.window import create_window
from torch_eaas.errors import ConfigError, HandshakeRefused, TransportError

NOTHING = {"handles": 0, "reservations": 0, "mappings": 0}


class TestCudaIpc(UnixTransportContract):
    MAKES = "from tests.comm.fake_cuda import fake_transport\ntransport = fake_transport()"

    @pytest.fixture
    @override
    def server(self) -> Transport:
        return fake_transport()

    @pytest.fixture
    @override
    def client(self, server: Transport) -> Transport:
        return fake_transport()


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(num_devices=2)


@pytest.fixture
def windows(cuda: FakeCuda) -> CudaWindows:
    return CudaWindows(CudaDriver(0, cuda))


# -- windows -----------------------------------------------------------------------------------


def test_a_window_has_no_view_and_says_what_to_take(windows: CudaWindows) -> None:
    window = windows.create(64)
    with pytest.raises(
        TransportError, match=r"lies in GPU memory, .* take window.memory, or use DeviceClient"
    ):
        _ = window.view
    window.close()


@pytest.mark.parametrize("nbytes", [1, GRANULARITY - 1, GRANULARITY, GRANULARITY + 1])
def test_a_window_keeps_the_size_asked_for_in_an_allocation_of_whole_units(
    nbytes: int, windows: CudaWindows
) -> None:
    window = windows.create(nbytes)
    assert (window.nbytes, window.memory.nbytes) == (nbytes, nbytes)
    assert os.fstat(window.fd).st_size == -(-nbytes // GRANULARITY) * GRANULARITY
    window.close()


def test_a_windows_memory_is_mapped_until_nobody_holds_it(
    cuda: FakeCuda, windows: CudaWindows
) -> None:
    window = windows.create(64)
    memory = window.memory
    window.close()
    assert cuda.held == {"handles": 0, "reservations": 1, "mappings": 1}
    del memory
    assert cuda.held == NOTHING


def test_a_windows_descriptor_is_closed_with_it_and_inherited_by_no_program(
    windows: CudaWindows,
) -> None:
    window = windows.create(64)
    fd = window.fd
    assert not os.get_inheritable(fd)
    window.close()
    assert not os.path.exists(f"/proc/self/fd/{fd}")
    with pytest.raises(TransportError, match="no file descriptor to hand on"):
        _ = window.fd


def test_an_importer_reads_and_writes_after_the_exporter_has_let_go(windows: CudaWindows) -> None:
    ours = windows.create(100)
    theirs = CudaWindows(CudaDriver(0, FakeCuda())).adopt(os.dup(ours.fd), 100)
    mapped(ours)[:4] = b"left"
    ours.close()
    gc.collect()
    assert bytes(mapped(theirs)[:6]) == b"left\0\0"
    mapped(theirs)[99] = 5
    assert mapped(theirs)[99] == 5
    theirs.close()


def test_a_forked_child_neither_closes_nor_unmaps(
    cuda: FakeCuda, windows: CudaWindows, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = windows.create(8)
    other = windows.create(8)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    window.close()
    # a forked child's copy ends without a close
    os.close(other.fd)
    del other
    monkeypatch.undo()
    assert cuda.held == {"handles": 0, "reservations": 2, "mappings": 2}
    assert os.fstat(window.fd).st_size == GRANULARITY
    window.close()


def test_a_mapping_that_the_driver_keeps_is_a_warning_and_no_error(
    cuda: FakeCuda, windows: CudaWindows, caplog: pytest.LogCaptureFixture
) -> None:
    window = windows.create(8)
    cuda.failing["cuMemUnmap"] = CUresult.CUDA_ERROR_ECC_UNCORRECTABLE
    with caplog.at_level(logging.WARNING):
        window.close()
    assert "a window of 8 bytes stays mapped: cuMemUnmap failed" in caplog.text


# -- sent by a peer ----------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", ["64", None, [64], 0, -1, 64.0, True], ids=str)
def test_a_size_that_is_no_positive_number_is_refused(nbytes: int, windows: CudaWindows) -> None:
    window = windows.create(64)
    fd = os.dup(window.fd)
    with pytest.raises(TransportError, match="must have a positive number of bytes, got"):
        windows.adopt(fd, nbytes)
    assert not os.path.exists(f"/proc/self/fd/{fd}")
    window.close()


def test_a_window_that_is_smaller_than_announced_is_refused_and_leaves_nothing(
    cuda: FakeCuda, windows: CudaWindows
) -> None:
    window = windows.create(GRANULARITY)
    before = cuda.held
    fd = os.dup(window.fd)
    with pytest.raises(
        TransportError,
        match=r"cannot map the peer's window: cuMemMap failed: CUDA_ERROR_INVALID_VALUE \(1\): "
        r"invalid value; a window that a peer sent may be smaller than it announced",
    ):
        windows.adopt(fd, GRANULARITY + 1)
    assert not os.path.exists(f"/proc/self/fd/{fd}")
    assert cuda.held == before
    window.close()


@pytest.mark.parametrize("kind", ["memfd", "socket"])
def test_a_descriptor_of_something_else_is_refused_and_closed(
    kind: str, windows: CudaWindows
) -> None:
    if kind == "memfd":
        fd = os.dup(create_window(64).fd)
    else:
        one, other = socket.socketpair()
        other.close()
        fd = one.detach()
    with pytest.raises(
        TransportError,
        match=r"cuMemImportFromShareableHandle failed: CUDA_ERROR_INVALID_HANDLE \(400\): .*; "
        r"what a peer sent may be no window in GPU memory",
    ):
        windows.adopt(fd, 64)
    assert not os.path.exists(f"/proc/self/fd/{fd}")


def test_a_peers_gpu_is_reached_over_nvlink_alone(cuda: FakeCuda, windows: CudaWindows) -> None:
    there = CudaWindows(CudaDriver(1, cuda)).create(64)
    with pytest.raises(
        TransportError, match=r"lies on GPU 1, and GPU 0 has no NVLink to it: words need atomics"
    ):
        windows.adopt(os.dup(there.fd), 64)
    cuda.nvlinks.add((0, 1))
    here = windows.adopt(os.dup(there.fd), 64)
    mapped(here)[3] = 9
    assert mapped(there)[3] == 9
    for window in (here, there):
        window.close()
    assert cuda.held == NOTHING


# -- two transports ----------------------------------------------------------------------------


@needs_x86
@pytest.mark.parametrize("is_server_on_gpu", [False, True])
def test_ends_of_different_transports_are_told_so_by_both_names_and_the_fix(
    is_server_on_gpu: bool,
) -> None:
    ends: list[Transport] = [SharedMemoryTransport(), fake_transport()]
    names = ["shared_memory", "cuda_ipc"]
    server, client = ends[is_server_on_gpu], ends[not is_server_on_gpu]
    mine, theirs = names[is_server_on_gpu], names[not is_server_on_gpu]
    handler = PlannedHandler(server)
    listener: Listener = server.listen("", handler)
    link = client.dial(listener.address, TIMEOUT_S)
    # what needs no window goes on: who it is, how it is
    assert link.call("echo", {"n": 1}, timeout=TIMEOUT_S)[0]["echo"] == {"n": 1}
    window = client.create_window(128)
    with pytest.raises(
        HandshakeRefused,
        match=rf"^{listener.address}: the client's windows are {theirs}'s, this server's are "
        rf"{mine}'s; give both the same transport \(transport=, --transport\)",
    ):
        link.call("handshake", {"size": 128}, [window], timeout=TIMEOUT_S)
    assert handler.came == {}
    assert not link.closed
    for opened in (window, link, listener):
        opened.close()


def test_a_window_of_no_bytes_is_refused_before_the_driver_is_asked(
    cuda: FakeCuda, windows: CudaWindows
) -> None:
    with pytest.raises(ConfigError, match="a window has at least one byte, got 0"):
        windows.create(0)
    assert cuda.calls["cuMemCreate"] == 0
