"""dequantize_rows: kernel, twin and arithmetic agree bit by bit.

Triton's interpreter takes fp8's NaN for 480, so the kernel is shown none; the GPU's conversion,
which ``test_compiled`` finds in the PTX, knows it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops import dequantize_rows, quantize_rows
from torch_eaas.ops.reference import dequantize_rows_ref
from torch_eaas.ops.row_dequantizer import launch

pytestmark = pytest.mark.usefixtures("poisoned_empty")

NAN, INF = float("nan"), float("inf")
SIZES = [(0, 128), (3, 0), (1, 1), (63, 64), (5, 129), (65, 300)]


def stored(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return any fp8 numbers but NaN, with a scale of its own for each block."""
    made = torch.Generator().manual_seed(rows * 1000 + columns)
    x_MK = torch.randint(0, 127, (rows, columns), generator=made, dtype=torch.uint8)
    x_MK += 128 * torch.randint(0, 2, (rows, columns), generator=made, dtype=torch.uint8)
    scale_Mk = torch.randn(rows, -(-columns // 128), generator=made).exp() * 1e-3
    return x_MK.view(torch.float8_e4m3fn), scale_Mk


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_each_number_is_multiplied_with_its_blocks_scale(rows: int, columns: int) -> None:
    x_MK, scale_Mk = stored(rows, columns)
    expected = x_MK.float() * scale_Mk.repeat_interleave(128, dim=1)[:, :columns]
    for dequantize in (launch, dequantize_rows_ref):
        got = dequantize(x_MK, scale_Mk, None, torch.float32)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_rows_are_rounded_from_fp32(dtype: torch.dtype) -> None:
    x_MK, scale_Mk = quantize_rows(torch.randn(7, 200))
    expected = dequantize_rows(x_MK, scale_Mk, dtype=torch.float32)
    assert torch.equal(dequantize_rows(x_MK, scale_Mk, dtype=dtype), expected.to(dtype))
    # Triton's interpreter cuts fp32 off where a GPU rounds it to bf16
    got = launch(x_MK, scale_Mk, None, dtype)
    torch.testing.assert_close(got.float(), expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_block_that_had_a_number_that_is_none_comes_back_as_nan(value: float) -> None:
    x_MK = torch.randn(3, 256)
    expected = dequantize_rows(*quantize_rows(x_MK), dtype=torch.float32)
    x_MK[1, 200] = value
    expected[1, 128:] = NAN
    got = dequantize_rows(*quantize_rows(x_MK), dtype=torch.float32)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_tokens", [[0, 0, 0], [1, 0, 5], [0, 7, -1]], ids=str)
def test_rows_that_no_slot_holds_are_left_alone(num_tokens: list[int]) -> None:
    x_MK, scale_Mk = quantize_rows(torch.randn(15, 130))
    num_tokens_S = torch.tensor(num_tokens, dtype=torch.int32)
    held = [slot * 5 + t for slot, count in enumerate(num_tokens) for t in range(min(count, 5))]
    rest = [row for row in range(15) if row not in held]
    whole = dequantize_rows(x_MK, scale_Mk, dtype=torch.float32)
    for dequantize in (launch, dequantize_rows_ref):
        got = dequantize(x_MK, scale_Mk, num_tokens_S, torch.float32)
        assert torch.equal(got[held], whole[held])
        # what ``torch.empty`` left there, poisoned
        assert got[rest].isnan().all()


def test_the_example_of_the_docstring_holds() -> None:
    x_MK, scale_Mk = torch.tensor([[448.0, 1.0]]).to(torch.float8_e4m3fn), torch.tensor([[2.0]])
    assert dequantize_rows(x_MK, scale_Mk).tolist() == [[896.0, 2.0]]


def test_what_does_not_fit_is_refused() -> None:
    x_MK, scale_Mk = quantize_rows(torch.zeros(2, 130))
    with pytest.raises(ConfigError, match=r"x_MK must be float8_e4m3fn, got torch.float32"):
        dequantize_rows(x_MK.float(), scale_Mk)
    message = r"scale_Mk must have shape \(2, 2\) beside rows of shape \(2, 130\), got \(2, 1\)"
    with pytest.raises(ConfigError, match=message):
        dequantize_rows(x_MK, scale_Mk[:, :1].contiguous())
    with pytest.raises(ConfigError, match=r"dtype must be torch.float32, .* got torch.int32"):
        dequantize_rows(x_MK, scale_Mk, dtype=torch.int32)
