"""The plain twins against loops over single numbers; what is left unwritten holds NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_eaas.ops.reference import (
    combine_ref,
    group_shrink_ref,
    pack_ref,
    swiglu_ref,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

GROUPS = pytest.mark.parametrize(
    ("groups", "num_groups"),
    [
        pytest.param([], 3, id="no rows"),
        pytest.param([], 0, id="no rows and no groups"),
        pytest.param([1], 3, id="one row"),
        pytest.param([-1], 3, id="one row of nobody"),
        pytest.param([-1, -1, -1], 0, id="no groups"),
        pytest.param([2, -1, 0, 2], 3, id="the docstring's"),
        pytest.param([(7 * i) % 5 - 1 for i in range(63)], 4, id="63 rows"),
        pytest.param([0] * 60 + [3, -1, 0], 4, id="skewed"),
        pytest.param([3, 2, 1, 0], 4, id="backwards"),
    ],
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- pack --------------------------------------------------------------------------------------


@GROUPS
def test_pack_sorts_rows_by_group_stably_with_nobodys_last(
    groups: list[int], num_groups: int
) -> None:
    order_R, counts_G = pack_ref(torch.tensor(groups, dtype=torch.int64), num_groups)
    expected = [row for g in range(num_groups) for row, own in enumerate(groups) if own == g]
    expected += [row for row, own in enumerate(groups) if own == -1]
    assert order_R.tolist() == expected
    assert counts_G.tolist() == [groups.count(g) for g in range(num_groups)]
    assert order_R.dtype == counts_G.dtype == torch.int64


def test_pack_takes_rows_that_are_not_contiguous() -> None:
    groups_KT = torch.tensor([[1, 0, -1], [0, 1, 1]])
    order_R, counts_G = pack_ref(groups_KT.t().reshape(-1)[::2], 2)
    # the rows 1, 0, -1 of the first expert of each token
    assert order_R.tolist() == [1, 0, 2]
    assert counts_G.tolist() == [1, 1]


# -- group_shrink ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts", [[], [0, 3, 0, 5], [0] * 4, [1] * 7, [63, 0, 1], [2], [0, 0, 1]], ids=str
)
def test_group_shrink_moves_the_groups_with_rows_to_the_front(counts: list[int]) -> None:
    groups_G, num_groups = group_shrink_ref(torch.tensor(counts, dtype=torch.int64))
    active = [group for group, count in enumerate(counts) if count > 0]
    assert groups_G.tolist() == active + [-1] * (len(counts) - len(active))
    assert num_groups.tolist() == [len(active)]


# -- SwiGLU ------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("num_rows", [0, 1, 63])
def test_swiglu_is_up_times_gate_times_the_gates_sigmoid(num_rows: int, dtype: torch.dtype) -> None:
    gate_up = (random(num_rows, 14) * 3).to(dtype)
    before = gate_up.clone()
    out = swiglu_ref(gate_up)
    expected = [
        [gate / (1 + math.exp(-gate)) * up for gate, up in zip(row[:7], row[7:], strict=True)]
        for row in before.double().tolist()
    ]
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(),
        torch.tensor(expected, dtype=torch.float64).view(num_rows, 7),
        **TOLERANCE[dtype],
    )
    assert torch.equal(gate_up, before)


# -- combine -----------------------------------------------------------------------------------


def combine_by_hand(
    rows_ND: Tensor, order: list[int], weights_TK: Tensor
) -> list[list[list[float]]]:
    """Return each token's weighted row of each expert; zeros where none was computed."""
    num_tokens, top_k = weights_TK.shape
    hidden = rows_ND.shape[1]
    out = [[[0.0] * hidden for _ in range(top_k)] for _ in range(num_tokens)]
    for position, numbers in enumerate(rows_ND.double().tolist()):
        token, k = divmod(order[position], top_k)
        weight = float(weights_TK[token, k])
        out[token][k] = [weight * number for number in numbers]
    return out


@DTYPES
@pytest.mark.parametrize("per_expert", [True, False])
@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([[0]], id="one token"),
        pytest.param([[-1, -1], [-1, -1]], id="nothing was computed"),
        pytest.param([[0, 1], [1, -1], [2, 2]], id="one expert twice and one of nobody"),
        pytest.param([[(t + k) % 4 - 1 for k in range(3)] for t in range(63)], id="63 tokens"),
    ],
)
def test_combine_brings_weighted_rows_back_into_token_order(
    groups: list[list[int]], per_expert: bool, dtype: torch.dtype
) -> None:
    groups_TK = torch.tensor(groups)
    order_R, counts_G = pack_ref(groups_TK.reshape(-1), 3)
    rows_ND = random(int(counts_G.sum()), 5).to(dtype)
    weights_TK = random(*groups_TK.shape, seed=1)
    expected = torch.tensor(combine_by_hand(rows_ND, order_R.tolist(), weights_TK))
    out = combine_ref(rows_ND, order_R, weights_TK, per_expert=per_expert)
    assert out.dtype == torch.float32
    torch.testing.assert_close(
        out, expected if per_expert else expected.sum(1), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("per_expert", [True, False])
def test_combine_takes_no_tokens(per_expert: bool) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    out = combine_ref(torch.zeros(0, 5), none, torch.zeros(0, 2), per_expert=per_expert)
    assert out.shape == ((0, 2, 5) if per_expert else (0, 5))


def test_combine_adds_up_in_order_of_k() -> None:
    # fp32 forgets the 1 beside 1e8, so the order of these three shows in the sum
    rows_ND = torch.tensor([[1e8], [1.0], [-1e8], [-1e8], [1e8], [1.0]])
    out_TD = combine_ref(rows_ND, torch.arange(6), torch.ones(2, 3), per_expert=False)
    assert out_TD.tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("per_expert", [True, False])
@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_the_weight_beside_an_expert_that_is_nobodys_is_never_used(
    weight: float, per_expert: bool
) -> None:
    # rows of the padding that some models route nowhere
    order_R, _ = pack_ref(torch.tensor([0, -1]), 1)
    weights_TK = torch.tensor([[2.0, weight]])
    out = combine_ref(torch.tensor([[3.0]]), order_R, weights_TK, per_expert=per_expert)
    assert out.flatten().tolist() == ([6.0, 0.0] if per_expert else [6.0])


def test_a_row_of_nan_spoils_its_own_token_only() -> None:
    order_R, _ = pack_ref(torch.tensor([0, 0, 0, 0]), 1)
    rows_ND = torch.ones(4, 2)
    rows_ND[2] = float("nan")
    out_TD = combine_ref(rows_ND, order_R, torch.ones(2, 2), per_expert=False)
    assert out_TD[0].tolist() == [2.0, 2.0]
    assert out_TD[1].isnan().all()
