"""Each branch of choosing a transport, by planned machines, and the log line that tells of it."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence

import pytest

from tests.comm.fake_cuda import FakeCuda, fake_transport
from tests.comm.test_shared_memory import needs_x86
from torch_eaas.comm import cuda_driver
from torch_eaas.comm.auto import (
    BETWEEN_PROCESSES,
    CANDIDATES,
    FIXED_PES,
    Candidate,
    choose_transport,
    transport_of,
)
from torch_eaas.comm.cuda_ipc import CudaIpcTransport
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.errors import ConfigError

NAMES = [candidate.name for candidate in CANDIDATES]


def planned(*possible: str) -> list[Candidate]:
    """Return candidates of which only some are possible, each made as a loopback of its name."""

    def make(name: str) -> Candidate:
        def transport(device: str) -> LoopbackTransport:
            made = LoopbackTransport()
            made.name = name, device  # type: ignore[attr-defined]
            return made

        return Candidate(
            name=name,
            why_not=lambda device: None if name in possible else f"no {name} on {device}",
            make=transport,
            caveat=lambda device: FIXED_PES if name == "nvshmem" else "",
            reaches_gpu=True,
        )

    return [make(name) for name in NAMES]


def chosen(name: str, device: str, possible: Sequence[str]) -> object:
    transport = choose_transport(name, device=device, candidates=planned(*possible))
    return transport.name  # type: ignore[attr-defined]


def gpu(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """Plan which GPUs this machine has."""
    monkeypatch.setattr(cuda_driver, "_bindings", lambda: cuda)


# -- what is picked ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("possible", "picked"),
    [
        (NAMES, "cuda_ipc"),
        (["nvshmem", "shared_memory", "loopback"], "nvshmem"),
        (["shared_memory", "loopback"], "shared_memory"),
        (["loopback"], "loopback"),
    ],
    ids=["all", "all but the first", "on the host", "threads alone"],
)
def test_auto_takes_the_first_that_is_possible(possible: list[str], picked: str) -> None:
    assert chosen("auto", "cuda:1", possible) == (picked, "cuda:1")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_takes_that_one_or_says_why_not(name: str) -> None:
    assert chosen(name, "cpu", NAMES) == (name, "cpu")
    others = [each for each in NAMES if each != name]
    with pytest.raises(
        ConfigError,
        match=f"^transport '{name}' is not possible for device cpu: {name}: no {name} on cpu$",
    ):
        chosen(name, "cpu", others)


def test_where_nothing_is_possible_every_reason_is_told() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^no transport is possible for device cuda: cuda_ipc: no cuda_ipc on cuda; "
        r"nvshmem: no nvshmem on cuda; shared_memory: .*; loopback: no loopback on cuda$",
    ):
        chosen("auto", "cuda", [])


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(
        ConfigError,
        match="for device cpu must be one of auto, cuda_ipc, nvshmem, shared_memory, loopback, "
        "got 'tcp'",
    ):
        choose_transport("tcp")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "0", ""])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device must be cpu, cuda or cuda:N, got '{device}'"):
        choose_transport(device=device)


# -- what is logged ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "possible", "line"),
    [
        (
            "auto",
            ["shared_memory", "loopback"],
            "transport shared_memory for device cuda:0; not cuda_ipc: no cuda_ipc on cuda:0; "
            "not nvshmem: no nvshmem on cuda:0; not loopback: possible, but further down the list",
        ),
        (
            "auto",
            ["nvshmem"],
            "transport nvshmem for device cuda:0 (when a PE dies invariants 1, 3 and 4 do not "
            "hold, and access cannot be revoked; see docs/transports.md); not cuda_ipc: no "
            "cuda_ipc on cuda:0; not shared_memory: no shared_memory on cuda:0; not loopback: no "
            "loopback on cuda:0",
        ),
        ("cuda_ipc", NAMES, "transport cuda_ipc for device cuda:0"),
    ],
    ids=["falls down the list", "invariants that do not hold", "by name"],
)
def test_the_log_says_what_was_picked_why_nothing_else_and_what_does_not_hold(
    name: str, possible: list[str], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "torch_eaas"):
        chosen(name, "cuda:0", possible)
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("INFO", line)


# -- the real candidates -----------------------------------------------------------------------


@needs_x86
def test_a_cpu_takes_shared_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch_eaas"):
        assert isinstance(choose_transport(), SharedMemoryTransport)
    assert "not cuda_ipc: its windows lie in a GPU's memory, and this end is on" in caplog.text


def test_a_gpu_takes_cuda_ipc_on_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(num_devices=3)
    gpu(monkeypatch, cuda)
    for device, number in (("cuda", 0), ("cuda:2", 2)):
        transport = choose_transport(device=device)
        assert isinstance(transport, CudaIpcTransport)
        assert transport._windows._driver.device == number  # type: ignore[attr-defined]


@needs_x86
def test_a_gpu_that_cannot_share_memory_leaves_shared_memory_with_its_caveat(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attribute = "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
    gpu(monkeypatch, FakeCuda(lacking=[attribute]))
    with caplog.at_level(logging.INFO, "torch_eaas"):
        assert isinstance(choose_transport(device="cuda"), SharedMemoryTransport)
    assert (
        "transport shared_memory for device cuda (kernels do not reach its windows, which lie in "
        "the host's memory); not cuda_ipc: cuda_ipc needs a GPU with memory that is shared"
    ) in caplog.text
    assert f"{attribute}=0" in caplog.text


def test_another_processor_without_a_gpu_leaves_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with caplog.at_level(logging.INFO, "torch_eaas"):
        assert isinstance(choose_transport(), LoopbackTransport)
    assert "(for threads of this process that are given this very object)" in caplog.text
    assert "not shared_memory: the shared_memory transport needs x86-64" in caplog.text


def test_nvshmem_is_refused_by_name_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"'nvshmem' is not possible .*: its processes start"):
        choose_transport("nvshmem", device="cuda:0")


# -- what an end is given ----------------------------------------------------------------------


@needs_x86
def test_an_end_keeps_the_object_that_it_is_given_and_makes_what_it_is_given_the_name_of() -> None:
    loopback = LoopbackTransport()
    assert transport_of(loopback) is loopback
    assert isinstance(transport_of("shared_memory"), SharedMemoryTransport)
    assert isinstance(transport_of("auto"), SharedMemoryTransport)
    assert BETWEEN_PROCESSES == ("auto", "cuda_ipc", "nvshmem", "shared_memory")


def test_loopback_by_name_is_refused_since_nobody_would_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"make one LoopbackTransport\(\) and give it to both"):
        transport_of("loopback")
    # nor does auto fall so far
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r"^no transport is possible for device cpu: .*x86-64"):
        transport_of("auto")


def test_an_end_on_the_cpu_cannot_take_windows_of_a_gpu_by_name() -> None:
    with pytest.raises(
        ConfigError,
        match="'cuda_ipc' is not possible for device cpu: cuda_ipc: its windows lie in a GPU's",
    ):
        transport_of("cuda_ipc")


@needs_x86
@pytest.mark.parametrize("make", [SharedMemoryTransport, LoopbackTransport])
def test_an_end_on_a_gpu_takes_no_windows_of_the_host(
    make: type[SharedMemoryTransport | LoopbackTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"kernels of cuda:0 do not reach the windows of {make.__name__}; use CudaIpc",
    ):
        transport_of(make(), device="cuda:0")
    with pytest.raises(
        ConfigError, match="for device cuda:0 must be one of auto, cuda_ipc, nvshmem, got 'shared_"
    ):
        transport_of("shared_memory", device="cuda:0")
    gpu(monkeypatch, FakeCuda(num_devices=0))
    with pytest.raises(ConfigError, match=r"no transport is possible for .*: .*NO_DEVICE"):
        transport_of("auto", device="cuda:0")
    on_gpu = fake_transport()
    assert transport_of(on_gpu, device="cuda:0") is on_gpu
