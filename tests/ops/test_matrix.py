"""Matrices as a CPU keeps them, against float64 and bit by bit; unwritten memory holds NaN."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_eaas.ops import matrix
from torch_eaas.ops.grouped_linear import grouped_linear
from torch_eaas.ops.matrix import (
    BlockedMatrix,
    Fp8Matrix,
    HalfMatrix,
    Matrix,
    PlainMatrix,
    keep_matrix,
)
from torch_eaas.ops.quantize import quantize_blocks

pytestmark = pytest.mark.usefixtures("poisoned_empty", "one_thread")

BLOCK = (16, 16)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp8(weight_ND: Tensor) -> Matrix:
    half = len(weight_ND) // 2
    parts = [quantize_blocks(part, BLOCK) for part in (weight_ND[:half], weight_ND[half:])]
    return Fp8Matrix(parts, BLOCK)


def threaded_half(weight_ND: Tensor) -> Matrix:
    torch.set_num_threads(3)
    return HalfMatrix(weight_ND.bfloat16())


needs_blocks = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch without oneDNN"
)
needs_halves = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch without FBGEMM"
)
# each kind, and the relative error of what it keeps
KINDS = pytest.mark.parametrize(
    ("keep", "error"),
    [
        pytest.param(lambda w: PlainMatrix(w, torch.float32), 0, id="plain"),
        pytest.param(lambda w: PlainMatrix(w.bfloat16(), torch.float32), 2**-9, id="cast"),
        pytest.param(BlockedMatrix, 0, id="blocked", marks=needs_blocks),
        pytest.param(lambda w: HalfMatrix(w.bfloat16()), 2**-9, id="half", marks=needs_halves),
        pytest.param(threaded_half, 2**-9, id="threaded half", marks=needs_halves),
        pytest.param(fp8, 2**-4, id="fp8"),
    ],
)


def multiply(x_RD: Tensor, kept: Matrix, *, deterministic: bool = False) -> Tensor:
    x_RD = x_RD.to(kept.dtype)
    return grouped_linear(x_RD, [kept], [len(x_RD)], deterministic=deterministic)


@KINDS
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 63, 130])
@pytest.mark.parametrize(("depth", "width"), [(24, 10), (72, 136), (513, 70)])
def test_rows_are_multiplied_with_the_transpose(
    keep: Callable[[Tensor], Matrix], error: float, num_rows: int, depth: int, width: int
) -> None:
    x_RD, weight_ND = random(num_rows, depth), random(width, depth, seed=1)
    out_RN = multiply(x_RD, keep(weight_ND))
    exact_RN = x_RD.double() @ weight_ND.double().t()
    # errors of single numbers add up at most: by the sum of magnitudes, fp32's own beside
    bound_RN = (x_RD.double().abs() @ weight_ND.double().abs().t()) * (error + 2**-20)
    assert out_RN.shape == (num_rows, width)
    assert ((out_RN - exact_RN).abs() <= bound_RN).all()


@KINDS
@pytest.mark.parametrize(("depth", "width"), [(24, 10), (72, 136), (544, 272)])
def test_a_row_has_the_same_bits_whatever_rows_share_its_product(
    keep: Callable[[Tensor], Matrix], error: float, depth: int, width: int
) -> None:
    kept = keep(random(width, depth, seed=1))
    x_RD = random(140, depth)
    alone = torch.cat([multiply(row, kept, deterministic=True) for row in x_RD.split(1)])
    for num_threads, count in product((1, 2), (*range(1, 71), 120, 121, 122, 140)):
        torch.set_num_threads(num_threads)
        start = (140 - count) // 2
        together = multiply(x_RD[start : start + count], kept, deterministic=True)
        expected = alone[start : start + count]
        assert torch.equal(together, expected), f"{count} rows, {num_threads} threads"


@KINDS
def test_nan_and_infinity_stay_in_their_row(keep: Callable[[Tensor], Matrix], error: float) -> None:
    kept, x_RD = keep(random(10, 24)), random(7, 24)
    clean = multiply(x_RD, kept)
    x_RD[0, 3], x_RD[4, 0] = float("nan"), float("inf")
    out_RN = multiply(x_RD, kept)
    assert not out_RN[[0, 4]].isfinite().any()
    assert torch.equal(out_RN[[1, 2, 3, 5, 6]], clean[[1, 2, 3, 5, 6]])


@needs_halves
@pytest.mark.parametrize("power", [-126, -40, -9, -8, 0, 15, 16, 100, 119])
def test_bf16_numbers_of_any_size_are_kept_as_halves(power: int) -> None:
    # 16 binades below the largest, with all 8 bits set
    weight_ND = torch.tensor([[255 / 256 * 2.0 ** (power - k) for k in range(16)]]).bfloat16()
    kept = HalfMatrix(weight_ND)
    x_RD = torch.eye(16)
    out_RN = multiply(x_RD, kept)
    assert torch.equal(out_RN, weight_ND.float().t())


@needs_halves
def test_bf16_numbers_far_below_the_largest_are_kept_to_within_2_to_the_minus_25() -> None:
    weight_ND = torch.tensor([[1.0, *(255 / 256 * 2.0**-k for k in range(14, 40))]]).bfloat16()
    out_RN = multiply(torch.eye(27), HalfMatrix(weight_ND))
    lost_D = (out_RN.t() - weight_ND.float()).abs()
    assert lost_D.max() <= 2.0**-25
    assert not lost_D[weight_ND.abs() >= 2.0**-17].any()


@needs_halves
@pytest.mark.parametrize(
    ("depth", "kind"),
    [(512, HalfMatrix), (384, HalfMatrix), (383, PlainMatrix), (520, PlainMatrix)],
)
def test_halves_are_not_taken_where_their_padding_costs_more_than_a_third(
    depth: int, kind: type[Matrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "multiplies_bf16", lambda: False)
    assert type(keep_matrix(random(3, depth).bfloat16())) is kind


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_matrix_with_a_number_that_is_none_stays_plain(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "multiplies_bf16", lambda: False)
    weight_ND = random(3, 512).bfloat16()
    weight_ND[1, 5] = bad
    out_RN = multiply(torch.ones(1, 512), keep_matrix(weight_ND))
    assert out_RN.isfinite().tolist() == [[True, False, True]]


@needs_blocks
@pytest.mark.parametrize("works", [True, False])
def test_a_cpu_with_bf16_products_gets_blocks_where_torch_has_them(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(matrix, "_has_blocks", lambda: works)
    made: list[Any] = []
    monkeypatch.setattr(matrix, "BlockedMatrix", made.append)
    kept = keep_matrix(random(3, 512).bfloat16())
    assert len(made) == works
    if not works:
        assert type(kept) is PlainMatrix
        assert kept.dtype == torch.bfloat16


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
@pytest.mark.parametrize("probe", ["_has_blocks", "_has_halves"])
def test_a_packing_that_torch_lacks_is_not_taken(
    probe: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(weight_ND: Tensor) -> Matrix:
        raise error

    kind = {"_has_blocks": "BlockedMatrix", "_has_halves": "HalfMatrix"}[probe]
    monkeypatch.setattr(matrix, kind, refuse)
    assert getattr(matrix, probe).__wrapped__() is False


@pytest.mark.parametrize("kind", [BlockedMatrix, HalfMatrix])
def test_a_packed_matrix_keeps_no_plain_one_beside(kind: type[Any]) -> None:
    weight_ND = random(512, 512).to(torch.bfloat16 if kind is HalfMatrix else torch.float32)
    kept = kind(weight_ND)
    gone = weakref.ref(weight_ND)
    del weight_ND
    gc.collect()
    assert gone() is None
    assert kept.num_outputs == 512


def test_where_the_quick_way_into_fbgemm_is_missing_the_other_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch, "fbgemm_pack_gemm_matrix_fp16")
    assert matrix._has_quick_halves.__wrapped__() is False
