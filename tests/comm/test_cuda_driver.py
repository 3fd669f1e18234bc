"""The driver's calls: what is asked of a GPU, in which order things are given back, each error."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.comm.fake_cuda import GARBAGE, GRANULARITY, CUresult, FakeCuda
from torch_eaas.comm import cuda_driver
from torch_eaas.comm.cuda_driver import CudaDriver
from torch_eaas.comm.cuda_ipc import CudaIpcTransport
from torch_eaas.errors import ConfigError, TransportError

NOTHING = {"handles": 0, "reservations": 0, "mappings": 0}

has_bindings = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="cuda-bindings is not installed",
)


# -- what is missing ---------------------------------------------------------------------------


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError,
        match=r"needs the package cuda-bindings \(.*\), which torch's CUDA builds bring; "
        r"pip install 'torch-eaas\[cuda\]'\. .*use transport='shared_memory'",
    ):
        CudaIpcTransport()


def test_a_missing_libcuda_is_named_with_what_to_do() -> None:
    class WithoutDriver(FakeCuda):
        def cuInit(self, flags: int) -> Any:  # noqa: N802 - the driver's name
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(
        ConfigError,
        match=r"needs libcuda.so.1, which NVIDIA's driver brings \(Failed to dlopen.*\); "
        r"where there is none, use transport='shared_memory'",
    ):
        CudaDriver(0, WithoutDriver())


@has_bindings
def test_the_real_package_says_that_there_is_no_driver_or_no_such_gpu() -> None:
    with pytest.raises(ConfigError, match=r"needs libcuda.so.1|GPU 10000: cu\w+ failed"):
        CudaDriver(10_000)


def test_a_package_that_lacks_a_function_is_named_with_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"needs cuDeviceGet, which this cuda-bindings has not; "):
        CudaDriver(0, FakeCuda(lacking=["cuDeviceGet"]))


@pytest.mark.parametrize(
    ("attribute", "what"),
    [
        ("CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING", "one address space with its host"),
        (
            "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
            "virtual memory management",
        ),
        (
            "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
            "memory that is shared by file descriptor",
        ),
    ],
)
def test_a_gpu_without_an_attribute_is_refused_by_its_name(attribute: str, what: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"needs a GPU with {what}, and GPU 0 has {attribute}=0; .*'shared_memory'",
    ):
        CudaDriver(0, FakeCuda(lacking=[attribute]))


@pytest.mark.parametrize(
    ("num_devices", "device", "message"),
    [
        (0, 0, r"GPU 0: cuInit failed: CUDA_ERROR_NO_DEVICE \(100\): no device; look at"),
        (2, 2, r"GPU 2: cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE \(101\): .*choose"),
        (1, -1, r"GPU -1: cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(num_devices: int, device: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"cuda_ipc cannot use {message}"):
        CudaDriver(device, FakeCuda(num_devices))


# -- memory ------------------------------------------------------------------------------------


def test_new_memory_is_zeroed_in_a_stream_of_its_own_before_anybody_has_it() -> None:
    cuda = FakeCuda()
    cuda.looks_until_ready = 3
    driver = CudaDriver(0, cuda)
    assert GARBAGE != b"\0"
    for _ in range(2):
        address, fd = driver.create(GRANULARITY + 1)
        os.close(fd)
        assert ctypes.string_at(address, 2 * GRANULARITY) == bytes(2 * GRANULARITY)
        driver.unmap(address, GRANULARITY + 1)
    # kept for the next window, like the context, which is put away after each use
    assert (cuda.calls["cuStreamCreate"], cuda.calls["cuDevicePrimaryCtxRetain"]) == (1, 1)
    assert cuda.calls["cuStreamQuery"] == 6
    assert cuda.contexts == []
    assert cuda.held == NOTHING


def test_a_gpu_that_does_not_zero_in_time_is_an_error_and_keeps_what_it_may_yet_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_driver, "ZERO_S", 0.01)
    cuda = FakeCuda()
    cuda.looks_until_ready = 10**9
    driver = CudaDriver(0, cuda)
    with pytest.raises(
        TransportError, match=rf"GPU 0 did not zero {GRANULARITY} bytes within 0.01 s; see what"
    ):
        driver.create(64)
    assert cuda.held == {"handles": 0, "reservations": 1, "mappings": 1}
    assert cuda.contexts == []


@pytest.mark.parametrize(
    "call",
    [
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent",
        "cuStreamCreate",
        "cuMemsetD8Async",
        "cuStreamQuery",
        "cuMemExportToShareableHandle",
    ],
)
def test_whichever_call_fails_while_a_window_is_made_nothing_is_left(call: str) -> None:
    cuda = FakeCuda()
    driver = CudaDriver(0, cuda)
    cuda.failing[call] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(
        TransportError,
        match=rf"^{call} failed: CUDA_ERROR_OUT_OF_MEMORY \(2\): out of memory; lower max_tokens",
    ):
        driver.create(64)
    assert cuda.held == NOTHING
    assert cuda.contexts == []
    cuda.failing.clear()
    address, fd = driver.create(64)
    os.close(fd)
    driver.unmap(address, 64)


@pytest.mark.parametrize(
    "call",
    [
        "cuMemImportFromShareableHandle",
        "cuMemGetAllocationPropertiesFromHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ],
)
def test_whichever_call_fails_while_a_window_is_taken_in_nothing_is_left(call: str) -> None:
    _, fd = CudaDriver(0, FakeCuda()).create(64)
    cuda = FakeCuda()
    driver = CudaDriver(0, cuda)
    cuda.failing[call] = CUresult.CUDA_ERROR_NOT_PERMITTED
    with pytest.raises(
        TransportError, match=rf"^{call} failed: .*; both ends must run as one user"
    ):
        driver.adopt(fd, 64)
    assert cuda.held == NOTHING


@pytest.mark.parametrize("error", [error for error in CUresult if error])
def test_each_error_of_the_driver_has_its_name_number_text_and_what_helps_if_anything_does(
    error: CUresult,
) -> None:
    cuda = FakeCuda()
    driver = CudaDriver(0, cuda)
    cuda.failing["cuMemCreate"] = error
    with pytest.raises(TransportError) as caught:
        driver.create(64)
    text = error.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower()
    told = f"cuMemCreate failed: {error.name} ({error.value}): {text}"
    step = cuda_driver._NEXT_STEPS.get(error.name)
    assert str(caught.value) == (f"{told}; {step}" if step else told)


def test_every_step_that_helps_is_for_an_error_of_the_driver() -> None:
    assert set(cuda_driver._NEXT_STEPS) <= {error.name for error in CUresult}


# -- the real package --------------------------------------------------------------------------


@has_bindings
def test_every_name_of_the_driver_that_is_used_is_the_packages() -> None:
    driver: Any = importlib.import_module("cuda.bindings.driver")
    source = Path(cuda_driver.__file__).read_text()
    functions = set(re.findall(r'"(cu[A-Z]\w+)"', source)) | {"cuGetErrorString"}
    assert len(functions) > 15
    for name in functions | set(re.findall(r"_cuda\.(CU\w+)", source)):
        assert hasattr(driver, name), name
    for kind, member in re.findall(r"_cuda\.(CU\w+)\.(CU_\w+|CUDA_\w+)", source):
        assert hasattr(getattr(driver, kind), member), member
    for name in cuda_driver._ATTRIBUTES:
        assert hasattr(driver.CUdevice_attribute, name), name
    for error in CUresult:
        theirs = getattr(driver.CUresult, error.name)
        assert (theirs.name, int(theirs)) == (error.name, error.value)


@has_bindings
def test_the_real_packages_descriptions_of_memory_can_be_filled() -> None:
    driver = CudaDriver(0, FakeCuda())
    driver._cuda = importlib.import_module("cuda.bindings.driver")
    driver.device = 3
    properties = driver._properties()
    assert properties.location.id == 3
    assert int(properties.type) == int(properties.location.type) == 1
    assert int(properties.requestedHandleTypes) == 1
