"""Grouped products against sums of single numbers; what is left unwritten holds NaN."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from torch_eaas.ops.grouped_linear import grouped_linear

pytestmark = pytest.mark.usefixtures("poisoned_empty")

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


COUNTS = pytest.mark.parametrize(
    "counts", [[], [0], [1], [1, 1], [2, 3, 4], [63, 0, 1], [5, 1, 40, 3]], ids=str
)


@DTYPES
@COUNTS
@pytest.mark.parametrize("deterministic", [True, False])
def test_grouped_linear_multiplies_each_row_with_its_groups_matrix(
    counts: list[int], dtype: torch.dtype, deterministic: bool
) -> None:
    x_RD = random(sum(counts), 24).to(dtype)
    weights = [random(10, 24, seed=1 + g).to(dtype) for g in range(len(counts))]
    out_RN = grouped_linear(x_RD, weights, counts, deterministic=deterministic)
    assert out_RN.dtype == dtype
    assert out_RN.shape == (sum(counts), 10 if counts else 0)
    groups = [g for g, count in enumerate(counts) for _ in range(count)]
    for row, g in enumerate(groups):
        for n in range(10):
            exact = sum(
                a * b for a, b in zip(x_RD[row].tolist(), weights[g][n].tolist(), strict=True)
            )
            tolerance = TOLERANCE[dtype]
            assert out_RN[row, n].item() == pytest.approx(
                exact, rel=tolerance["rtol"], abs=tolerance["atol"] * 5
            )


def test_grouped_linear_multiplies_in_the_rows_dtype() -> None:
    x_RD, weight_ND = random(5, 24), random(10, 24, seed=1).bfloat16()
    out_RN = grouped_linear(x_RD, [weight_ND], [5])
    assert out_RN.dtype == torch.float32
    torch.testing.assert_close(
        out_RN.double(), x_RD.double() @ weight_ND.double().t(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("depth", "width"), [(24, 10), (72, 136), (256, 512)])
def test_a_row_has_the_same_bits_whatever_rows_share_its_group(
    dtype: torch.dtype, depth: int, width: int
) -> None:
    x_RD = random(70, depth).to(dtype)
    weight_ND = random(width, depth, seed=1).to(dtype)
    alone = torch.cat([grouped_linear(row, [weight_ND], [1]) for row in x_RD.split(1)])
    # two threads cut the rows into other parts
    for num_threads, count in product((1, 2), range(1, 71)):
        torch.set_num_threads(num_threads)
        start = (70 - count) // 2
        rows = x_RD[start : start + count]
        together = grouped_linear(rows, [weight_ND], [count])
        expected = alone[start : start + count]
        assert torch.equal(together, expected), f"{count} rows, {num_threads} threads"


def test_nan_and_infinity_stay_in_their_row() -> None:
    x_RD = random(6, 24)
    weights = [random(10, 24, seed=g) for g in range(2)]
    clean = grouped_linear(x_RD, weights, [2, 4])
    x_RD[0, 3], x_RD[4, 0] = float("nan"), float("inf")
    out_RN = grouped_linear(x_RD, weights, [2, 4])
    assert not out_RN[[0, 4]].isfinite().any()
    assert torch.equal(out_RN[[1, 2, 3, 5]], clean[[1, 2, 3, 5]])
