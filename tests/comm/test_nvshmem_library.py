"""What NVSHMEM needs is checked before it starts, and each refusal says what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.comm.fake_nvshmem import ID_BYTES, FakeNvshmem, make_wheel
from torch_eaas.comm import nvshmem_checks, nvshmem_library
from torch_eaas.comm.nvshmem_checks import (
    check_ordering,
    check_registration,
    check_versions,
    find_bitcode,
    version_of,
)
from torch_eaas.comm.nvshmem_library import NvshmemLibrary
from torch_eaas.errors import ConfigError, PeerTimeout, TransportError

GENERIC = "libnvshmem_device.bc"


@pytest.fixture(autouse=True)
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of 3.6.5 is installed, and nothing is left in the environment."""
    for name in ("NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_DISABLE_DATA_DIRECT"):
        monkeypatch.setenv(name, "?")
    lib = make_wheel(tmp_path / "nvshmem", "3.6.5", GENERIC)
    monkeypatch.setattr(nvshmem_checks, "wheel_folders", lambda: [lib])
    return lib


def library(fake: FakeNvshmem, *, ibgda: bool = False) -> NvshmemLibrary:
    return NvshmemLibrary(0, ibgda=ibgda, modules=fake.modules)


def started(fake: FakeNvshmem) -> NvshmemLibrary:
    made = library(fake)
    made.start(made.new_id(), 0, 1, 5)
    return made


# -- its parts ---------------------------------------------------------------------------------


def test_the_file_for_the_gpu_goes_before_the_one_for_all(tmp_path: Path) -> None:
    lib = make_wheel(tmp_path / "new", "3.8.0", GENERIC, "libnvshmem_device_sm_90.bc")
    assert find_bitcode(90, [tmp_path, lib]) == lib / "libnvshmem_device_sm_90.bc"
    assert find_bitcode(100, [lib]) == lib / GENERIC
    assert version_of(lib / GENERIC) == (3, 8, 0)


def test_a_gpu_without_a_file_is_told_which_there_are(tmp_path: Path) -> None:
    lib = make_wheel(tmp_path / "new", "3.7.2", "libnvshmem_device_sm_90.bc")
    with pytest.raises(
        ConfigError, match=r"for sm_100 is missing, .* only libnvshmem_device_sm_90"
    ):
        find_bitcode(100, [lib])


def test_without_the_wheel_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is in none of: .*; pip install nvshmem4py-cu13"):
        find_bitcode(90, [tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="is in none of: no wheel of it; pip install"):
        find_bitcode(90, [])


def test_parts_of_two_versions_are_refused(wheel: Path) -> None:
    check_versions((3, 6, 5), wheel / GENERIC, ibgda=True)
    match = r"host library is 3\.4\.5 and its device library .* is 3\.6\.5: .*nvshmem-cu13==3\.6\.5"
    with pytest.raises(ConfigError, match=match):
        check_versions((3, 4, 5), wheel / GENERIC, ibgda=False)


def test_a_library_that_tells_no_version_is_taken(tmp_path: Path) -> None:
    assert version_of(tmp_path / "a" / "b.bc") is None
    check_versions((3, 4, 5), tmp_path / "a" / "b.bc", ibgda=False)


def test_what_torch_pins_cannot_reach_the_network_card_from_a_kernel(tmp_path: Path) -> None:
    lib = make_wheel(tmp_path / "pinned", "3.4.5", GENERIC)
    check_versions((3, 4, 5), lib / GENERIC, ibgda=False)
    match = r"ibgda=True needs an NVSHMEM of at least 3\.5\.0 and this is 3\.4\.5.*--no-deps"
    with pytest.raises(ConfigError, match=match):
        check_versions((3, 4, 5), lib / GENERIC, ibgda=True)


# -- the machine -------------------------------------------------------------------------------


def test_a_gpu_that_does_not_order_the_cards_writes_is_refused() -> None:
    check_ordering(100)
    check_ordering(200)
    with pytest.raises(ConfigError, match=r"WRITES_ORDERING is 0, at least 100 is needed; use"):
        check_ordering(0)


@pytest.mark.parametrize("module", ["module/nvidia_peermem", "kernel/mm/memory_peers/nv_mem"])
def test_either_dmabuf_or_a_kernel_module_gives_the_card_the_memory(
    module: str, tmp_path: Path
) -> None:
    check_registration(True, tmp_path)
    with pytest.raises(ConfigError, match=r"no dma-buf and .*nvidia_peermem is not loaded; modpro"):
        check_registration(False, tmp_path)
    (tmp_path / module).mkdir(parents=True)
    (tmp_path / module / "version").write_text("1")
    check_registration(False, tmp_path)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(nvshmem_library, "import_module", missing)
    with pytest.raises(ConfigError, match=r"needs nvshmem4py \(No module named 'nvshmem\.core'\)"):
        NvshmemLibrary(0, ibgda=False)


def test_without_a_driver_it_says_so() -> None:
    fake = FakeNvshmem()

    def no_driver() -> None:
        raise RuntimeError('"cuda" is an NVIDIA driver library')

    fake.device.set_current = no_driver
    with pytest.raises(ConfigError, match=r"needs GPU 0 and its driver \(libcuda.so.1\): \"cuda\""):
        library(fake)


@pytest.mark.parametrize(
    ("fake", "match"),
    [
        (FakeNvshmem(ordering=0), "GPU_DIRECT_RDMA_WRITES_ORDERING is 0"),
        (FakeNvshmem("3.4.5"), "host library is 3.4.5 and its device library"),
        (FakeNvshmem("3.7.0"), "install --no-deps nvidia-nvshmem-cu13==3.7.0"),
    ],
    ids=["ordering", "older", "newer"],
)
def test_all_is_checked_before_anything_starts(fake: FakeNvshmem, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        library(fake, ibgda=True)
    assert fake.calls == [("device", 0)]


# -- what it does ------------------------------------------------------------------------------


@pytest.mark.parametrize("ibgda", [True, False])
def test_it_starts_under_the_id_and_says_what_the_config_says(ibgda: bool) -> None:
    fake = FakeNvshmem()
    made = library(fake, ibgda=ibgda)
    unique_id = bytes(range(ID_BYTES))
    made.start(unique_id, 2, 5, 5)
    assert fake.calls[1:] == [("init", unique_id, 2, 5)]
    assert os.environ["NVSHMEM_IB_ENABLE_IBGDA"] == str(int(ibgda))
    # what a data-direct card writes is not ordered by the GPU
    assert os.environ["NVSHMEM_DISABLE_DATA_DIRECT"] == "1"
    assert (made.version, made.bitcode.name) == ((3, 6, 5), GENERIC)


def test_an_id_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="id has 128 bytes, PE 0 left 64: all PEs need the same"):
        library(FakeNvshmem()).start(bytes(64), 1, 2, 5)


def test_a_start_that_fails_names_the_pe_and_the_next_step() -> None:
    fake = FakeNvshmem()
    fake.init_error = "status 7"
    with pytest.raises(ConfigError, match=r"PE 1 of 2: NVSHMEM did not start: status 7; NVSHMEM_D"):
        library(fake).start(bytes(ID_BYTES), 1, 2, 5)


def test_a_pe_that_does_not_come_ends_the_wait() -> None:
    fake = FakeNvshmem()
    fake.others_came.clear()
    with pytest.raises(PeerTimeout, match=r"PE 1 waited 0\.05 s for all 3 PEs to start, and one"):
        library(fake).start(bytes(ID_BYTES), 1, 3, 0.05)
    fake.others_came.set()


def test_memory_that_is_not_there_is_asked_for_by_name() -> None:
    made = started(FakeNvshmem())
    assert made.allocate(100) % 128 == 0
    with pytest.raises(ConfigError, match=r"no 2\.0 MiB of symmetric memory left; raise NVSHMEM_S"):
        made.allocate(2 << 20)


def test_puts_that_do_not_arrive_end_the_wait() -> None:
    fake = FakeNvshmem()
    made = started(fake)
    made.settle(5)
    assert fake.calls[-1] == ("quiet", 7)
    fake.is_idle = False
    with pytest.raises(PeerTimeout, match=r"has not arrived within 0.01 s; when a PE dies"):
        made.settle(0.01)


def test_a_kernel_is_made_known_or_refused() -> None:
    fake = FakeNvshmem()
    made = started(fake)
    made.register(99)
    assert fake.calls[-1] == ("module", 99)
    fake.status = 3
    with pytest.raises(
        TransportError, match=r"refused a kernel's module with status 3: .*device.bc"
    ):
        made.register(99)


def test_a_pe_that_only_puts_reach_must_keep_their_order() -> None:
    fake, near = FakeNvshmem(ordering=0), FakeNvshmem()
    fake.peers = {1: near}
    made = started(fake)
    assert made.direct(fake.heap + 256, 1) == near.heap + 256
    with pytest.raises(ConfigError, match="GPU_DIRECT_RDMA_WRITES_ORDERING is 0"):
        made.direct(fake.heap, 2)
