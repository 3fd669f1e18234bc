"""swiglu and swiglu_quantize: the kernel before any cast against the twins."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops.activation import launch, launch_into, swiglu, swiglu_quantize
from torch_eaas.ops.reference import quantize_rows_ref, swiglu_quantize_ref, swiglu_rows_ref

pytestmark = pytest.mark.usefixtures("poisoned_empty")

NAN, INF = float("nan"), float("inf")
CLOSE = {"rtol": 1e-6, "atol": 1e-6, "equal_nan": True}
SIZES = [
    *((0, 8), (3, 0), (1, 1), (63, 64), (64, 65), (65, 127), (127, 128), (128, 129), (129, 63)),
    *((300, 1), (1, 300)),
]


def random(rows: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + size)
    return torch.randn(rows, 2 * size, generator=generator) * 4


def totals(num_rows: int) -> Tensor:
    return torch.tensor([-77, -77, num_rows], dtype=torch.int32)


def launched(gate_up: Tensor, totals_3: Tensor | None = None) -> Tensor:
    """Run the kernel into fp32: what a cast would be given."""
    out_RI = torch.full((gate_up.shape[0], gate_up.shape[1] // 2), 77.0)
    launch_into(gate_up, totals_3, out_RI, None)
    return out_RI


def launched_quantize(gate_up: Tensor, totals_3: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out_RI = torch.full((gate_up.shape[0], gate_up.shape[1] // 2), 77.0)
    scale_Ri = torch.full((out_RI.shape[0], -(-out_RI.shape[1] // 128)), 77.0)
    launch_into(gate_up, totals_3, out_RI, scale_Ri)
    return out_RI, scale_Ri


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_the_kernel_gives_what_the_twin_gives(rows: int, size: int) -> None:
    gate_up = random(rows, size)
    torch.testing.assert_close(launched(gate_up), swiglu_rows_ref(gate_up, None), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_are_computed_in_fp32(dtype: torch.dtype) -> None:
    gate_up = random(5, 130).to(dtype)
    torch.testing.assert_close(launched(gate_up), swiglu_rows_ref(gate_up.float(), None), **CLOSE)


def test_the_output_has_the_inputs_dtype_and_is_rounded_once() -> None:
    gate_up = random(4, 9)
    assert launch(gate_up.half(), None).dtype == torch.float16
    expected = [
        [gate / (1 + math.exp(-gate)) * up for gate, up in zip(row[:9], row[9:], strict=True)]
        for row in gate_up.bfloat16().double().tolist()
    ]
    rounded = torch.tensor(expected, dtype=torch.float64).bfloat16()
    assert torch.equal(swiglu_rows_ref(gate_up.bfloat16(), None), rounded)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("column", [2, 9], ids=["gate", "up"])
def test_a_number_that_is_none_spoils_its_own_row_only(column: int, value: float) -> None:
    gate_up = random(6, 7)
    expected = swiglu_rows_ref(gate_up, None)
    gate_up[4, column] = value
    got = launched(gate_up)
    torch.testing.assert_close(got, swiglu_rows_ref(gate_up, None), **CLOSE)
    # an infinite gate times a finite up may be infinite, of any sign, or NaN
    assert not got[4, 2].isfinite()
    expected[4, 2] = got[4, 2] = 0
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 100])
def test_rows_beyond_the_total_are_left_alone(num_rows: int) -> None:
    gate_up = random(65, 3)
    expected = swiglu_rows_ref(gate_up, None)
    gate_up[num_rows:] = NAN
    got, twin = launched(gate_up, totals(num_rows)), swiglu_rows_ref(gate_up, totals(num_rows))
    torch.testing.assert_close(got[:num_rows], expected[:num_rows], **CLOSE)
    assert torch.equal(twin[:num_rows], expected[:num_rows])
    assert bool((got[num_rows:] == 77).all())
    assert bool(twin[num_rows:].isnan().all())


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_quantised_it_is_scaled_block_by_block(rows: int, size: int) -> None:
    gate_up = random(rows, size)
    scaled_RI, scale_Ri = launched_quantize(gate_up)
    plain_RI = swiglu_rows_ref(gate_up, None)
    _, expected = swiglu_quantize_ref(gate_up, None)
    torch.testing.assert_close(scale_Ri, expected, **CLOSE)
    unit = expected.repeat_interleave(128, dim=1)[:, :size]
    torch.testing.assert_close(scaled_RI, plain_RI / unit, rtol=1e-6, atol=1e-4)


def test_the_quantising_twin_is_swiglu_in_fp32_and_then_quantize_rows() -> None:
    gate_up = random(9, 200).bfloat16()
    expected = quantize_rows_ref(swiglu_rows_ref(gate_up.float(), None), 128, None)
    for got, wanted in zip(swiglu_quantize_ref(gate_up, None), expected, strict=True):
        assert torch.equal(got.float(), wanted.float())


def test_quantised_rows_beyond_the_total_are_left_alone() -> None:
    gate_up = random(9, 130)
    for got, whole in zip(
        launched_quantize(gate_up, totals(5)), launched_quantize(gate_up), strict=True
    ):
        assert torch.equal(got[:5], whole[:5])
        assert bool((got[5:] == 77).all())
    for got, whole in zip(
        swiglu_quantize_ref(gate_up, totals(5)), swiglu_quantize_ref(gate_up, None), strict=True
    ):
        assert torch.equal(got.float()[:5], whole.float()[:5])
        assert bool(got.float()[5:].isnan().all())


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it() -> None:
    gate_up = random(65, 129)
    whole, alone = launched_quantize(gate_up), launched_quantize(gate_up[41:42].clone())
    for many, one in zip(whole, alone, strict=True):
        assert torch.equal(many[41:42], one)


def test_the_examples_of_the_docstrings_hold() -> None:
    gate_up = torch.tensor([[0.0, 2.0, 5.0, 3.0]])
    value = 3 * 2 / (1 + math.exp(-2))
    assert value == pytest.approx(5.28, abs=0.005)
    assert swiglu(gate_up).tolist() == [[0.0, pytest.approx(value)]]
    stored, scale = swiglu_quantize(gate_up)
    assert stored.float().tolist() == [[0.0, 448.0]]
    assert scale.tolist() == [[pytest.approx(value / 448)]]
    assert value / 448 == pytest.approx(0.0118, abs=0.00005)


@pytest.mark.parametrize("op", [swiglu, swiglu_quantize])
def test_rows_that_have_no_two_halves_are_refused(op: object) -> None:
    assert callable(op)
    with pytest.raises(ConfigError, match=r"gate_up_R2I must have a half .* got shape \(2, 5\)"):
        op(torch.zeros(2, 5))


def test_totals_of_another_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"totals_3 must be int32, got torch.int64"):
        swiglu(torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64))


def test_totals_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"totals_3 must be group_shrink's, got shape \(1,\)"):
        swiglu(torch.zeros(2, 4), torch.zeros(1, dtype=torch.int32))
