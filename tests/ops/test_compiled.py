"""The kernels as they compile for Hopper and Blackwell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.compiling import CAPABILITIES, Compiled, compiled, find
from torch_eaas.ops import (
    activation,
    combining,
    packing,
    row_dequantizer,
    row_quantizer,
    shrinking,
)

# all kernels are compiled for the first test

BF16 = torch.bfloat16


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


LAUNCHES: dict[str, Callable[[], object]] = {
    "group_shrink 464": lambda: shrinking.launch(ints(464), 64),
    "group_shrink 65536": lambda: shrinking.launch(ints(65536), 64),
    "pack": lambda: packing.launch(ints(128, 128, 8), ints(128), ints(128), ints(58, 256), 65536),
    "quantize_rows": lambda: row_quantizer.launch(
        torch.zeros(512, 7168, dtype=BF16), 128, ints(128)
    ),
    # one kernel for all batches of a client: none is compiled in the middle of a request
    "quantize_rows of a client": lambda: [
        row_quantizer.launch(torch.zeros(rows, 7168, dtype=BF16), 128, None) for rows in (1, 7, 16)
    ],
    "dequantize_rows": lambda: row_dequantizer.launch(
        torch.zeros(512, 7168, dtype=torch.float8_e4m3fn), torch.zeros(512, 56), ints(128), BF16
    ),
    "swiglu": lambda: activation.launch(torch.zeros(512, 4096, dtype=BF16), ints(3)),
    "swiglu_quantize": lambda: activation.launch_quantize(
        torch.zeros(512, 4096, dtype=BF16), ints(3)
    ),
    "combine": lambda: combining.launch(
        torch.zeros(64, 7168, dtype=BF16), ints(512, 8), torch.zeros(512, 8), False, ints(128)
    ),
    "combine per expert": lambda: combining.launch(
        torch.zeros(64, 7168), ints(512, 8), torch.zeros(512, 8), True, None
    ),
    # Triton makes constants of sizes that are 1
    "sizes of one": lambda: (
        shrinking.launch(ints(1), 1),
        packing.launch(ints(1, 1, 1), ints(1), ints(1), ints(1, 1), 1),
        row_quantizer.launch(torch.zeros(1, 1), 128, ints(1)),
        row_dequantizer.launch(
            torch.zeros(1, 1, dtype=torch.float8_e4m3fn), torch.zeros(1, 1), ints(1), BF16
        ),
        activation.launch_quantize(torch.zeros(1, 2), ints(3)),
        combining.launch(torch.zeros(1, 1), ints(1, 1), torch.zeros(1, 1), False, ints(1)),
    ),
}

EACH = pytest.mark.parametrize("launch", LAUNCHES)
TARGETS = pytest.mark.parametrize("capability", CAPABILITIES)


MOVES_ROWS = [
    ("quantize_rows", "_quantize_kernel"),
    ("swiglu", "_swiglu_kernel"),
    ("swiglu_quantize", "_swiglu_kernel"),
    ("combine", "_combine_kernel"),
    ("combine per expert", "_combine_kernel"),
]
QUANTISES = [MOVES_ROWS[0], MOVES_ROWS[2]]


def kernels_of(launch: str, capability: int) -> list[Compiled]:
    return [c for c in compiled(__name__) if (c.launch, c.capability) == (launch, capability)]


@TARGETS
@EACH
def test_every_kernel_compiles_and_spills_nothing(launch: str, capability: int) -> None:
    kernels = kernels_of(launch, capability)
    assert kernels
    for kernel in kernels:
        assert f".target sm_{capability}" in kernel.ptx
        assert kernel.local_bytes == 0, kernel.kernel
        assert kernel.count(r"\b(ld|st)\.local") == 0, kernel.kernel


@TARGETS
@pytest.mark.parametrize(("launch", "kernel"), MOVES_ROWS)
def test_rows_are_moved_128_bits_at_a_time(launch: str, kernel: str, capability: int) -> None:
    found = find(__name__, launch, kernel, capability)
    assert found.count(r"ld\.global\.v4\.b32") >= 2
    assert found.count(r"st\.global\.v4\.b32") >= 1
    # a row's numbers are never moved one by one, narrow or fp32
    assert found.count(r"(ld|st)\.global\.b(8|16)\b") == 0


@TARGETS
@pytest.mark.parametrize(("launch", "kernel"), QUANTISES)
def test_the_cast_to_fp8_rounds_to_nearest_and_saturates(
    launch: str, kernel: str, capability: int
) -> None:
    found = find(__name__, launch, kernel, capability)
    assert found.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") == found.count(r"cvt.*e4m3") > 0
    # the scale and the scaled numbers are those of the CPU, to the last bit
    assert found.count(r"div\.rn\.f32") > 0


@TARGETS
def test_a_clients_batches_of_all_sizes_are_quantised_by_one_kernel(capability: int) -> None:
    assert len(kernels_of("quantize_rows of a client", capability)) == 1


@TARGETS
def test_fp8_is_brought_back_by_the_gpus_own_conversion(capability: int) -> None:
    found = find(__name__, "dequantize_rows", "_dequantize_kernel", capability)
    assert found.count(r"cvt\.rn\.f16x2\.e4m3x2") > 0
    assert found.count(r"st\.global\.v[24]\.b32") > 0


@TARGETS
def test_a_tokens_sum_rounds_each_product_and_each_sum(capability: int) -> None:
    found = find(__name__, "combine", "_combine_kernel", capability)
    assert found.count(r"fma\.") == 0
    assert found.count(r"mul\.rn\.f32") >= 8


@TARGETS
@EACH
def test_no_order_is_left_to_atomics(launch: str, capability: int) -> None:
    for kernel in kernels_of(launch, capability):
        assert kernel.count(r"\b(atom|red)\.") == 0, kernel.kernel
