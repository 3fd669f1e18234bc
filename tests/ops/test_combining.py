"""combine_rows: the kernel in the interpreter against the twin, the twin by a loop over numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops.combining import combine_rows, launch
from torch_eaas.ops.reference import combine_rows_ref

pytestmark = pytest.mark.usefixtures("poisoned_empty")

NAN, INF = float("nan"), float("inf")
BOTH = pytest.mark.parametrize("per_expert", [True, False], ids=["rows", "sums"])
SIZES = [
    pytest.param(0, 2, 5, id="no tokens"),
    pytest.param(1, 1, 1, id="one token"),
    pytest.param(3, 0, 5, id="no experts"),
    pytest.param(3, 2, 0, id="no columns"),
    pytest.param(63, 2, 64, id="63 tokens"),
    pytest.param(5, 8, 129, id="eight experts, 129 columns"),
    pytest.param(3, 3, 1030, id="1030 columns, two blocks"),
    pytest.param(64, 1, 65, id="64 tokens"),
    pytest.param(65, 1, 127, id="65 tokens"),
    pytest.param(127, 1, 128, id="127 tokens"),
    pytest.param(128, 1, 1, id="128 tokens"),
    pytest.param(129, 1, 63, id="129 tokens"),
    pytest.param(300, 1, 3, id="300 tokens"),
]


def inputs(num_tokens: int, top_k: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, places, a quarter of them -1 with a weight of NaN beside, and weights."""
    generator = torch.Generator().manual_seed(num_tokens + hidden)
    num_rows = num_tokens * top_k
    places = torch.randperm(num_rows, generator=generator).int().view(num_tokens, top_k)
    weights = torch.randn(num_tokens, top_k, generator=generator)
    is_none = torch.rand(num_tokens, top_k, generator=generator) < 0.25
    places[is_none] = -1
    weights[is_none] = NAN
    return torch.randn(num_rows, hidden, generator=generator), places, weights


@BOTH
@pytest.mark.parametrize(("num_tokens", "top_k", "hidden"), SIZES)
def test_the_kernel_gives_what_the_twin_gives_bit_by_bit(
    num_tokens: int, top_k: int, hidden: int, per_expert: bool
) -> None:
    given = (*inputs(num_tokens, top_k, hidden), per_expert, None)
    got, expected = launch(*given), combine_rows_ref(*given)
    assert got.dtype == expected.dtype == torch.float32
    assert got.shape == expected.shape
    assert torch.equal(got, expected)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_are_weighted_in_fp32(dtype: torch.dtype, per_expert: bool) -> None:
    rows_ND, places_TK, weights_TK = inputs(5, 3, 130)
    given = (rows_ND.to(dtype), places_TK, weights_TK, per_expert, None)
    assert torch.equal(launch(*given), combine_rows_ref(*given))


@pytest.mark.parametrize(("num_tokens", "top_k", "hidden"), SIZES)
def test_the_twin_adds_each_tokens_weighted_rows_up(
    num_tokens: int, top_k: int, hidden: int
) -> None:
    rows_ND, places_TK, weights_TK = inputs(num_tokens, top_k, hidden)
    expected = torch.zeros((num_tokens, top_k, hidden), dtype=torch.float64)
    for token in range(num_tokens):
        for k in range(top_k):
            place = int(places_TK[token, k])
            if place >= 0:
                expected[token, k] = rows_ND[place].double() * float(weights_TK[token, k])
    rows = combine_rows_ref(rows_ND, places_TK, weights_TK, True, None)
    torch.testing.assert_close(rows.double(), expected, rtol=1e-6, atol=1e-6)
    sums = combine_rows_ref(rows_ND, places_TK, weights_TK, False, None)
    torch.testing.assert_close(sums.double(), expected.sum(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("do", [launch, combine_rows_ref])
def test_sums_are_made_in_order_of_k_whatever_the_places(do: Callable[..., Tensor]) -> None:
    # fp32 forgets the 1 beside 1e8, so the order of these three shows in the sum
    rows_ND = torch.tensor([[1e8], [1.0], [-1e8]])
    places_TK = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 0, 2]], dtype=torch.int32)
    out_TD = do(rows_ND, places_TK, torch.ones(3, 3), False, None)
    assert out_TD.tolist() == [[0.0], [1.0], [0.0]]


@BOTH
@pytest.mark.parametrize("do", [launch, combine_rows_ref])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_row_that_is_no_number_spoils_its_own_token_only(
    value: float, do: Callable[..., Tensor], per_expert: bool
) -> None:
    rows_ND = torch.ones(4, 2)
    rows_ND[2] = value
    places_TK = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    out = do(rows_ND, places_TK, torch.ones(2, 2), per_expert, None).view(2, -1)
    assert out[0].tolist() == ([1.0] * 4 if per_expert else [2.0] * 2)
    assert not bool(out[1, :2].isfinite().any())


@BOTH
@pytest.mark.parametrize("do", [launch, combine_rows_ref])
@pytest.mark.parametrize("num_tokens", [[0, 0, 0], [1, 0, 5], [5, 5, 5], [0, 7, -1]], ids=str)
def test_tokens_that_no_slot_holds_are_left_alone(
    num_tokens: list[int], do: Callable[..., Tensor], per_expert: bool
) -> None:
    rows_ND, places_TK, weights_TK = inputs(15, 2, 9)
    held = [slot * 5 + t for slot, count in enumerate(num_tokens) for t in range(min(count, 5))]
    rest = [token for token in range(15) if token not in held]
    expected = combine_rows_ref(rows_ND, places_TK, weights_TK, per_expert, None)
    places_TK[rest] = 10**9
    num_tokens_S = torch.tensor(num_tokens, dtype=torch.int32)
    out = do(rows_ND, places_TK, weights_TK, per_expert, num_tokens_S)
    assert torch.equal(out[held], expected[held])
    # what nobody writes is what poisoned memory held
    assert bool(out[rest].isnan().all())


@BOTH
@pytest.mark.parametrize("do", [launch, combine_rows_ref])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_rounded_once_at_their_end(
    dtype: torch.dtype, do: Callable[..., Tensor], per_expert: bool
) -> None:
    # 257.5 is no bf16 number, 257.5 + 0.5 is one
    rows_ND = torch.tensor([[257.5, 2.0], [0.5, 3.0]])
    places_TK = torch.tensor([[0, 1]], dtype=torch.int32)
    out = do(rows_ND, places_TK, torch.ones(1, 2), per_expert, None, dtype)
    assert out.dtype == dtype
    if per_expert:
        assert out[0, 1].tolist() == [0.5, 3.0]
    else:
        assert out.tolist() == [[258.0, 5.0]]


def test_sums_in_another_dtype_are_refused() -> None:
    places_TK = torch.zeros((1, 1), dtype=torch.int32)
    with pytest.raises(ConfigError, match=r"out_dtype must be float32, bfloat16 or .* got .*int32"):
        combine_rows(torch.zeros(1, 1), places_TK, torch.zeros(1, 1), out_dtype=torch.int32)


def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it() -> None:
    rows_ND, places_TK, weights_TK = inputs(65, 4, 300)
    whole = launch(rows_ND, places_TK, weights_TK, False, None)
    alone = launch(rows_ND, places_TK[41:42].clone(), weights_TK[41:42].clone(), False, None)
    assert torch.equal(whole[41:42], alone)


def test_the_example_of_the_docstring_holds() -> None:
    places_TK = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
    weights_TK = torch.tensor([[10.0, 1.0], [5.0, 9.0]])
    rows_ND = torch.tensor([[1.0], [2.0], [3.0]])
    assert combine_rows(rows_ND, places_TK, weights_TK).tolist() == [[31.0], [10.0]]
    rows = combine_rows(rows_ND, places_TK, weights_TK, per_expert=True)
    assert rows.tolist() == [[[30.0], [1.0]], [[10.0], [0.0]]]


def test_weights_of_another_shape_are_refused() -> None:
    message = r"weights_TK must have the shape of places_TK, \(2, 2\), got \(2, 3\)"
    with pytest.raises(ConfigError, match=message):
        combine_rows(torch.zeros(4, 1), torch.zeros((2, 2), dtype=torch.int32), torch.zeros(2, 3))


def test_weights_of_another_dtype_are_refused() -> None:
    places_TK = torch.zeros((2, 2), dtype=torch.int32)
    with pytest.raises(ConfigError, match=r"weights_TK must be float32, got torch.bfloat16"):
        combine_rows(torch.zeros(4, 1), places_TK, torch.zeros(2, 2).bfloat16())
