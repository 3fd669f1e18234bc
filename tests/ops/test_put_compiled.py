"""The put kernel as it compiles: linked with NVSHMEM's bitcode, where its wheel is installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton

from tests.ops.compiling import CAPABILITIES, Compiled, compiled
from torch_eaas.comm.nvshmem_checks import IBGDA_SINCE, version_of, wheel_folders
from torch_eaas.errors import ConfigError
from torch_eaas.ops import put_linking
from torch_eaas.ops.pair_table import ClientTables, ServerTables
from torch_eaas.ops.put_linking import explain_link_failure, load_put_kernel
from torch_eaas.ops.put_slots import launch, launch_replies, put_kernel
from torch_eaas.ops.put_table import PutColumn

P, S, R = 32, 4, 16


def bitcode() -> str:
    """Return NVSHMEM's device library, or nothing where its wheel is not installed."""
    files = [folder / "libnvshmem_device.bc" for folder in wheel_folders()]
    return next((str(file) for file in files if file.is_file()), "")


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def launch_requests(path: str, *, unaligned: bool = False) -> None:
    t, puts_PQ = ClientTables.empty(P, S), zeros(P, len(PutColumn))
    gate = zeros(3)[1:2] if unaligned else zeros(1)
    launch(t.pairs_PC, puts_PQ, zeros(P, dtype=torch.int32), t.slots_P, gate, path)


def launch_answers(path: str) -> None:
    t, puts_PQ = ServerTables.empty(P, S), zeros(P, len(PutColumn))
    statuses_R, ready_R = zeros(R, dtype=torch.int32), zeros(R, dtype=torch.int32)
    launch_replies(t.pairs_PC, puts_PQ, statuses_R, ready_R, zeros(1), S, path)


def link_with_what_does_not_define_it() -> None:
    """Link with the wrong library; ptxas must tell, or a wrong name would never be seen."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "lib"
    with pytest.raises(ConfigError, match=r"does not link with the put kernel.*Unresolved extern"):
        load_put_kernel(str(folder / "libdevice.10.bc"), "cpu")


def link_with_what_is_no_bitcode() -> None:
    with pytest.raises(ConfigError, match=r"cannot read NVSHMEM's bitcode .*no LLVM bitcode"):
        load_put_kernel(triton.__file__, "cpu")


def link_with_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"does not link with the put kernel: .*No such file"):
        load_put_kernel("/nowhere/libnvshmem_device.bc", "cpu")


def launch_all(path: str) -> None:
    """Launch both ends, whatever the alignment: Triton must compile, and load, one kernel.

    NVSHMEM is told of the module that ``load_put_kernel`` loaded, and of no other.
    """
    before = num_compiled()
    table, entries = zeros(1), zeros(1, dtype=torch.int32)
    put_linking._compiled(path, table, table, entries, entries, table)
    launch_requests(path)
    launch_requests(path, unaligned=True)
    launch_answers(path)
    assert num_compiled() - before == 1


def num_compiled() -> int:
    return sum(len(caches[0]) for caches in put_kernel.device_caches.values())


LAUNCHES: dict[str, Callable[[], object]] = {
    "by stores": lambda: launch_all(""),
    "wrong library": link_with_what_does_not_define_it,
    "no bitcode": link_with_what_is_no_bitcode,
    "no file": link_with_what_is_not_there,
}
if bitcode():
    LAUNCHES["by NVSHMEM"] = lambda: launch_all(bitcode())

ON_EACH = pytest.mark.parametrize("capability", CAPABILITIES)
linked = pytest.mark.skipif(not bitcode(), reason="needs the wheel nvidia-nvshmem-cu13")
with_ibgda = pytest.mark.skipif(
    not bitcode() or (version_of(Path(bitcode())) or IBGDA_SINCE) < IBGDA_SINCE,
    reason="needs nvidia-nvshmem-cu13 of at least 3.5, over what torch pins",
)


def kernels_of(launch: str, capability: int) -> list[Compiled]:
    return [c for c in compiled(__name__) if (c.launch, c.capability) == (launch, capability)]


@ON_EACH
def test_by_stores_the_bytes_come_before_the_word(capability: int) -> None:
    [kernel] = kernels_of("by stores", capability)
    [release] = re.finditer(r"atom\.global\.sys\.release\.exch\.b64", kernel.ptx)
    stores = [match.start() for match in re.finditer(r"\bst\.global", kernel.ptx)]
    barriers = [match.start() for match in re.finditer(r"\bbar\.sync", kernel.ptx)]
    assert stores
    assert any(max(stores) < barrier < release.start() for barrier in barriers)


@ON_EACH
def test_a_library_that_lacks_the_put_is_refused_with_the_next_step(capability: int) -> None:
    # each of the three has asserted, in its process, what it is told
    for name in ("wrong library", "no bitcode", "no file"):
        assert kernels_of(name, capability) == []


@linked
@ON_EACH
def test_both_ends_launch_one_kernel_that_is_linked_with_nvshmem(capability: int) -> None:
    [kernel] = kernels_of("by NVSHMEM", capability)
    assert f".target sm_{capability}" in kernel.ptx
    # all that is left open is the device's printf
    assert set(re.findall(r"\.extern \.func .*?(\w+)\s*\n?\(", kernel.ptx)) <= {"vprintf"}
    assert kernel.count(r"ld\.const\.b64\s.*nvshmemi_device_state_d") > 0


@with_ibgda
@ON_EACH
def test_the_linked_kernel_can_put_through_the_nic_without_the_host(capability: int) -> None:
    [kernel] = kernels_of("by NVSHMEM", capability)
    # bitcode before 3.5 has the way through a host thread alone
    assert kernel.count("nvshmemi_ibgda_device_state_d") > 0


@linked
@ON_EACH
def test_all_threads_of_a_block_call_the_put(capability: int) -> None:
    [kernel] = kernels_of("by NVSHMEM", capability)
    # its barrier counts them all
    assert kernel.count(r"\bbar(rier)?\.sync") > 0
    assert ".reqntid 256" in kernel.ptx


def test_what_clang_made_the_bitcode_is_told(tmp_path: Path) -> None:
    file = tmp_path / "libnvshmem_device.bc"
    file.write_bytes(b"BC\xc0\xde...clang version 99.1.0 (somewhere)")
    error = explain_link_failure(ValueError("Failed to parse library at x"), str(file))
    match = rf"Triton {triton.__version__} cannot read .*made by clang 99\.1\.0\): install a Triton"
    with pytest.raises(ConfigError, match=match):
        raise error
