"""quantize_rows: the kernel before its cast against the twin (Triton's interpreter casts wrongly).

The cast itself is asserted in the PTX (``test_compiled``). Here the CPU's own cast, which saturates
and rounds as the GPU's instruction does, is given what the kernel computed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops.quantize import dequantize_blocks
from torch_eaas.ops.reference import quantize_rows_ref
from torch_eaas.ops.row_quantizer import launch_into, quantize_rows

pytestmark = pytest.mark.usefixtures("poisoned_empty")

NAN, INF = float("nan"), float("inf")
SIZES = [
    *((0, 128), (3, 0), (1, 1), (63, 64), (64, 65), (65, 127), (127, 128), (128, 129), (129, 63)),
    *((300, 1), (1, 300)),
]


def random(rows: int, columns: int) -> Tensor:
    """Give each row and column its own size, so that a wrong scale shows."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    sizes = torch.logspace(-3, 3, rows)[:, None] * torch.logspace(-1, 1, columns)
    return torch.randn(rows, columns, generator=generator) * sizes


def launched(x_MK: Tensor, block: int, num_tokens_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run the kernel; return what it gives to the cast, cast by the CPU, and the scales."""
    scaled_MK = torch.full(x_MK.shape, 77.0)
    scale_Mk = torch.full((x_MK.shape[0], -(-x_MK.shape[1] // block)), 77.0)
    launch_into(x_MK, block, num_tokens_S, scaled_MK, scale_Mk)
    return scaled_MK.to(torch.float8_e4m3fn), scale_Mk


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare FP8 numbers and scales bit by bit; NaN is NaN whatever its sign."""
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "columns", "block"), [*((*size, 128) for size in SIZES), (5, 100, 32)]
)
def test_the_kernel_gives_what_the_twin_gives_bit_by_bit(
    rows: int, columns: int, block: int
) -> None:
    x_MK = random(rows, columns)
    assert_same(launched(x_MK, block), quantize_rows_ref(x_MK, block, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_are_scaled_in_fp32(dtype: torch.dtype) -> None:
    x_MK = random(7, 200).to(dtype)
    assert_same(launched(x_MK, 128), quantize_rows_ref(x_MK, 128, None))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_number_that_is_none_spoils_its_own_block_and_shows_in_its_scale(value: float) -> None:
    x_MK = random(6, 256)
    expected = quantize_rows_ref(x_MK, 128, None)
    x_MK[4, 200] = value
    got = launched(x_MK, 128)
    assert_same(got, quantize_rows_ref(x_MK, 128, None))
    assert got[1][4, 1].isnan() if value != value else got[1][4, 1].isinf()
    assert got[0].float()[4, 200].isnan()
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.float()[[0, 1, 2, 3, 5]], theirs.float()[[0, 1, 2, 3, 5]])
    assert got[1][4, 0] == expected[1][4, 0]


@pytest.mark.parametrize("value", [0.0, 2.0**-149, -(2.0**-149)])
def test_a_block_without_a_scale_keeps_one(value: float) -> None:
    x_MK = torch.full((1, 130), value)
    x_MK[0, 129] = 896.0
    got = launched(x_MK, 128)
    assert got[1].tolist() == [[1.0, 2.0]]
    assert got[0].float().abs().tolist() == [[0.0] * 129 + [448.0]]


@pytest.mark.parametrize("num_tokens", [[0, 0, 0], [1, 0, 5], [5, 5, 5], [0, 7, -1]], ids=str)
def test_rows_that_no_slot_holds_are_left_alone(num_tokens: list[int]) -> None:
    x_MK = random(15, 130)
    num_tokens_S = torch.tensor(num_tokens, dtype=torch.int32)
    held = [slot * 5 + t for slot, count in enumerate(num_tokens) for t in range(min(count, 5))]
    rest = [row for row in range(15) if row not in held]
    expected = quantize_rows_ref(x_MK, 128, None)
    x_MK[rest] = NAN
    for got, whole, twin in zip(
        launched(x_MK, 128, num_tokens_S),
        expected,
        quantize_rows_ref(x_MK, 128, num_tokens_S),
        strict=True,
    ):
        assert torch.equal(got.float()[held], whole.float()[held])
        assert torch.equal(twin.float()[held], whole.float()[held])
        assert bool((got.float()[rest] == torch.tensor(77.0).to(got.dtype).float()).all())
        assert bool(twin.float()[rest].isnan().all())


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it() -> None:
    x_MK = random(65, 129)
    whole, alone = launched(x_MK, 128), launched(x_MK[41:42].clone(), 128)
    for many, one in zip(whole, alone, strict=True):
        assert torch.equal(many.float()[41:42], one.float())


def test_a_round_trip_stays_within_half_a_step_of_fp8() -> None:
    x_MK = random(63, 300)
    stored, scale = quantize_rows(x_MK)
    error = (dequantize_blocks(stored, scale, (1, 128)) - x_MK).abs()
    unit = scale.repeat_interleave(128, dim=1)[:, :300]
    # 3 mantissa bits: half of 1/8 of the value; below 2**-6 the steps are 2**-9 wide
    assert bool((error <= torch.maximum(x_MK.abs() / 16, unit * 2**-10) * (1 + 1e-5)).all())


def test_the_example_of_the_docstring_holds() -> None:
    stored, scale = quantize_rows(torch.tensor([[448.0, 1.0, 896.0, 2.0]]), 2)
    assert stored.float().tolist() == [[448.0, 1.0, 448.0, 1.0]]
    assert scale.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("block", [0, -4, 96])
def test_a_block_that_is_no_power_of_two_is_refused(block: int) -> None:
    with pytest.raises(ConfigError, match=f"block must be a power of two, got {block}"):
        quantize_rows(torch.zeros(2, 4), block)


def test_rows_of_another_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match="x_MK must be float32 or bfloat16 or float16, got"):
        quantize_rows(torch.zeros((2, 4), dtype=torch.float64))


@pytest.mark.parametrize("slots", [0, 4])
def test_slots_that_do_not_divide_the_rows_are_refused(slots: int) -> None:
    message = f"num_tokens_S names {slots} slots, which must be at least 1 and divide the 6 rows"
    with pytest.raises(ConfigError, match=message):
        quantize_rows(torch.zeros((6, 4)), num_tokens_S=torch.zeros(slots, dtype=torch.int32))
