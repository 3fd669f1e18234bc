import math

import pytest
import torch
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops.quantize import dequantize_blocks, quantize_blocks

CASES = [
    pytest.param(0, 5, (128, 128), id="no rows"),
    pytest.param(1, 1, (128, 128), id="one value"),
    pytest.param(63, 63, (128, 128), id="63, less than a block"),
    pytest.param(128, 128, (128, 128), id="exactly one block"),
    pytest.param(129, 129, (128, 128), id="129, one row and column over"),
    pytest.param(192, 160, (128, 128), id="192 x 160, two partial blocks"),
    pytest.param(576, 72, (128, 128), id="576, as R1's kv_a_proj"),
    pytest.param(7, 10, (2, 3), id="blocks that are not square"),
]


def weight(rows: int, columns: int) -> Tensor:
    """Give every place its own size, so that a wrong block shows."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    sizes = torch.logspace(-3, 3, rows)[:, None] * torch.logspace(-1, 1, columns)
    return torch.randn(rows, columns, generator=generator) * sizes


def largest(weight_NK: Tensor, row: int, column: int, block: tuple[int, int]) -> float:
    """Return the largest magnitude in one block, by a loop over its values."""
    found = 0.0
    for n in range(row * block[0], min((row + 1) * block[0], weight_NK.shape[0])):
        for value in weight_NK[n, column * block[1] : (column + 1) * block[1]].tolist():
            found = max(found, abs(value))
    return found


@pytest.mark.parametrize(("rows", "columns", "block"), CASES)
def test_a_scale_is_its_blocks_largest_value_over_448(
    rows: int, columns: int, block: tuple[int, int]
) -> None:
    weight_NK = weight(rows, columns)
    stored, scale = quantize_blocks(weight_NK, block)
    assert stored.dtype == torch.float8_e4m3fn
    assert stored.shape == weight_NK.shape
    assert scale.dtype == torch.float32
    assert scale.shape == (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            expected = largest(weight_NK, row, column, block) / 448
            assert scale[row, column].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("rows", "columns", "block"), CASES)
def test_each_value_comes_back_times_its_own_blocks_scale(
    rows: int, columns: int, block: tuple[int, int]
) -> None:
    grid = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    scale = 1 + torch.arange(grid[0] * grid[1], dtype=torch.float32).reshape(grid)
    stored = weight(rows, columns).clamp(-448, 448).to(torch.float8_e4m3fn)
    expected = stored.float()
    for n in range(rows):
        for k in range(columns):
            expected[n, k] *= scale[n // block[0], k // block[1]]
    got = dequantize_blocks(stored, scale, block)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "columns", "block"), CASES)
def test_a_round_trip_stays_within_half_a_step_of_fp8(
    rows: int, columns: int, block: tuple[int, int]
) -> None:
    weight_NK = weight(rows, columns)
    stored, scale = quantize_blocks(weight_NK, block)
    error = (dequantize_blocks(stored, scale, block) - weight_NK).abs()
    for n in range(rows):
        unit = scale[n // block[0]].repeat_interleave(block[1])[:columns]
        # 3 mantissa bits: half of 1/8 of the value; below 2**-6 the steps are 2**-9 wide
        bound = torch.maximum(weight_NK[n].abs() / 16, unit * 2**-10)
        assert bool((error[n] <= bound * (1 + 1e-5)).all())


def test_a_block_of_zeros_keeps_scale_one_and_its_neighbour_its_own() -> None:
    stored, scale = quantize_blocks(torch.tensor([[0.0, 0.0, 896.0]]), (1, 2))
    assert scale.tolist() == [[1.0, 2.0]]
    assert stored.float().tolist() == [[0.0, 0.0, 448.0]]


def test_a_block_too_small_to_have_a_scale_becomes_zeros() -> None:
    stored, scale = quantize_blocks(torch.tensor([[2.0**-149, 0.0]]), (1, 2))
    assert scale.tolist() == [[1.0]]
    assert stored.float().tolist() == [[0.0, 0.0]]


def test_the_example_of_the_docstring_holds() -> None:
    stored, scale = quantize_blocks(torch.tensor([[448.0, 1.0], [896.0, 2.0]]), (1, 2))
    assert stored.float().tolist() == [[448.0, 1.0], [448.0, 1.0]]
    assert scale.tolist() == [[1.0], [2.0]]
    assert dequantize_blocks(stored, scale, (1, 2)).tolist() == [[448.0, 1.0], [896.0, 2.0]]


def test_a_bfloat16_weight_is_scaled_in_fp32() -> None:
    weight_NK = weight(130, 5).bfloat16()
    stored, scale = quantize_blocks(weight_NK, (128, 128))
    same_stored, same_scale = quantize_blocks(weight_NK.float(), (128, 128))
    assert torch.equal(stored.view(torch.uint8), same_stored.view(torch.uint8))
    assert torch.equal(scale, same_scale)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (3, 2), (2, 3)], ids=str)
def test_a_grid_of_another_shape_is_refused(grid: tuple[int, int]) -> None:
    stored = torch.zeros(192, 160).to(torch.float8_e4m3fn)
    message = rf"shape \({grid[0]}, {grid[1]}\).*\(192, 160\).*\(128, 128\) needs \(2, 2\)"
    with pytest.raises(ConfigError, match=message):
        dequantize_blocks(stored, torch.ones(grid), (128, 128))


def test_a_weight_that_is_no_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be a matrix, got shape \(4,\)"):
        quantize_blocks(torch.ones(4), (128, 128))


def test_a_block_of_no_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 1, got \(0, 128\)"):
        dequantize_blocks(torch.ones(4, 4), torch.ones(1, 1), (0, 128))


@pytest.mark.parametrize("block", [(16, 16), (12, 16)], ids=["whole blocks", "partial blocks"])
def test_every_fp8_number_comes_back_as_torch_casts_it(block: tuple[int, int]) -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    grid = (math.ceil(16 / block[0]), math.ceil(16 / block[1]))
    for factor in (1.0, 0.1, 2.0**-140):
        out = dequantize_blocks(stored, torch.full(grid, factor), block)
        assert out.isnan().sum() == 2
        assert out[0, 0].item() == 0
        torch.testing.assert_close(
            out, stored.float() * torch.tensor(factor), rtol=0, atol=0, equal_nan=True
        )


def test_a_weight_that_is_not_fp8_is_scaled_too() -> None:
    out = dequantize_blocks(torch.tensor([[3.0, 0.1]]), torch.tensor([[2.0]]), (1, 2))
    assert torch.equal(out, torch.tensor([[6.0, 0.2]]))
