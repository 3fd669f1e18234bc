"""The grouped GEMM's kernel in the interpreter, against the twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.gemm_problems import problem
from torch_eaas.ops import gemm_kernel
from torch_eaas.ops.gemm_config import GemmConfig

pytestmark = pytest.mark.usefixtures("poisoned_empty", "one_thread")

NUMBER = pytest.mark.parametrize("number", ["fp32", "bf16", "fp8"])
DESCRIBED = pytest.mark.parametrize("may_describe", [True, False], ids=["descriptor", "pointers"])
INPUTS = {"fp32": 40, "bf16": 72, "fp16": 72, "fp8": 144}
"""Two steps of the sum, the second not whole."""


@pytest.mark.parametrize(
    ("counts", "block_rows"),
    [
        pytest.param([0] * 5, 16, id="none"),
        pytest.param([3], 16, id="the only one"),
        pytest.param([1] * 7, 16, id="all, one row each"),
        pytest.param([65, 0, 0, 0], 32, id="first only"),
        pytest.param([0, 0, 0, 64], 32, id="last only"),
        pytest.param([0, 0, 129, 0], 128, id="one in the middle"),
        pytest.param([1, 392, 0, 2, 1, 4], 64, id="one has 98 %"),
        pytest.param([0, 1, 63, 64, 65, 127, 128, 129, 300], 128, id="sizes around a tile's"),
        pytest.param([5, 0, 33, 0, 0, 17, 2, 0, 1, 40], 16, id="random"),
    ],
)
@NUMBER
def test_each_row_meets_its_groups_matrix(number: str, counts: list[int], block_rows: int) -> None:
    case = problem(number, counts, 63, INPUTS[number])
    case.check(case.kernel(block_rows))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (63, 33), (65, 128), (129, 257)])
@DESCRIBED
@NUMBER
def test_outputs_and_inputs_may_be_of_any_number(
    number: str, may_describe: bool, outputs: int, inputs: int
) -> None:
    case = problem(number, [2, 0, 17], outputs, inputs)
    case.check(case.kernel(may_describe=may_describe))


@DESCRIBED
@NUMBER
def test_rows_are_gathered_and_matrices_found_in_their_slots(
    number: str, may_describe: bool
) -> None:
    case = problem(number, [7, 0, 4, 9], 150, INPUTS[number])
    # seven tokens of three experts each; one pair is nobody's, and a buffer has room for more
    order = [3 * (i * 5 % 7) + i % 3 for i in range(20)] + [-1, -1, -1]
    case = replace(case.gathered(order, 3), slots=(2, -1, 0, 3))
    case.check(case.kernel(config=GemmConfig(), may_describe=may_describe))


def test_fp16_is_multiplied_too() -> None:
    case = problem("fp16", [3, 18], 63, INPUTS["fp16"])
    case.check(case.kernel())


@DESCRIBED
@NUMBER
def test_a_row_whose_matrix_is_in_no_slot_becomes_nan_and_harms_no_other(
    number: str, may_describe: bool
) -> None:
    case = replace(problem(number, [2, 3, 4, 1], 63, INPUTS[number]), slots=(4, 0, -1, 3))
    out_RN = case.kernel(may_describe=may_describe)
    case.check(out_RN)
    assert out_RN.isnan().all(1).tolist() == [True] * 2 + [False] * 3 + [True] * 4 + [False]


@DESCRIBED
@NUMBER
def test_nan_and_infinity_stay_in_their_row_and_their_group(
    number: str, may_describe: bool
) -> None:
    case = problem(number, [3, 0, 2, 4], 63, INPUTS[number])
    clean = case.kernel(may_describe=may_describe)
    # a block that holds NaN has the scale NaN; the interpreter takes NaN in FP8 for 480
    part = 1 if number == "fp8" else 0
    x, weights = list(case.x), list(case.weights)
    x[part], weights[part] = x[part].clone(), weights[part].clone()
    x[part][0, -1], x[part][4, 0] = float("nan"), float("inf")
    weights[part][1] = float("nan")
    spoilt = replace(case, x=tuple(x), weights=tuple(weights))
    out_RN = spoilt.kernel(may_describe=may_describe)
    assert not out_RN[[0, 4]].isfinite().any()
    assert torch.equal(out_RN[[1, 2, 3, 5, 6, 7, 8]], clean[[1, 2, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize("block_rows", [16, 64])
@NUMBER
def test_a_row_has_the_same_bits_alone_and_in_any_company(number: str, block_rows: int) -> None:
    case = problem(number, [2, 70, 3], 63, INPUTS[number])
    together = case.kernel(block_rows)
    # the first of a tile, so that NumPy too computes it at the same place of a product
    for row, group in ((2, 1), (66, 1)):
        counts = tuple(int(g == group) for g in range(3))
        alone = replace(case, x=tuple(part[row : row + 1] for part in case.x), counts=counts)
        assert torch.equal(alone.kernel(block_rows), together[row : row + 1])


@pytest.mark.parametrize("block_rows", [16, 32, 64, 128, 256])
@NUMBER
def test_the_blocks_of_a_sum_are_added_in_ascending_order(number: str, block_rows: int) -> None:
    block = {"fp32": 32, "bf16": 64, "fp8": 128}[number]
    case = problem(number, [1, 0, 18, 3], 5, 4 * block)
    # one number a block; fp32 forgets 1 beside 2**27, so ascending order alone leaves just 1
    numbers = torch.tensor([2.0**27, 1, -(2.0**27), 1])
    x_MK = torch.zeros(22, 4, block)
    x_MK[:, :, 3] = numbers.sign() if number == "fp8" else numbers
    x = x_MK.view(22, -1).to(case.x[0].dtype), numbers.abs().expand(22, 4).contiguous()
    weights = tuple(torch.ones_like(part.float()).to(part.dtype) for part in case.weights)
    out_RN = replace(case, x=x[: len(case.x)], weights=weights).kernel(block_rows)
    assert torch.equal(out_RN, torch.ones_like(out_RN))


@NUMBER
def test_what_is_packed_and_what_is_gathered_have_the_same_bits(number: str) -> None:
    case = problem(number, [5, 0, 20], 63, INPUTS[number])
    order = [(i * 7) % 25 for i in range(25)]
    packed = replace(case, x=tuple(part[order] for part in case.x))
    assert torch.equal(case.gathered(order, 1).kernel(), packed.kernel())


@pytest.mark.parametrize("split_k", [2, 4])
@NUMBER
def test_a_sum_may_be_cut_into_parts_that_are_added_up(number: str, split_k: int) -> None:
    # three steps: of four parts the last has none
    case = problem(number, [2, 0, 18], 70, 3 * INPUTS[number] // 2)
    config = GemmConfig(batch_invariant=False, split_k=split_k)
    case.check(case.kernel(config=config))


def test_a_long_list_is_searched_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_kernel, "_CHUNK", 4)
    case = problem("fp32", [(g % 3 == 1) * (1 + g) for g in range(43)], 7, 8)
    case.check(case.kernel())


@NUMBER
def test_rows_that_belong_to_no_group_are_not_written(number: str) -> None:
    case = problem(number, [2, 3], 63, INPUTS[number])
    out_RN = replace(case, counts=(2, 0)).kernel()
    assert out_RN[2:].isnan().all(), "torch.empty was poisoned with it"


@pytest.mark.parametrize(
    ("counts", "outputs", "inputs"), [([], 5, 5), ([0], 5, 5), ([2, 1], 0, 5), ([2, 1], 5, 0)]
)
@pytest.mark.parametrize("split_k", [1, 2])
def test_what_is_empty_stays_empty_and_a_sum_of_nothing_is_zero(
    counts: list[int], outputs: int, inputs: int, split_k: int
) -> None:
    case = problem("bf16", counts, outputs, inputs)
    out_RN = case.kernel(config=GemmConfig(batch_invariant=False, split_k=split_k))
    assert out_RN.dtype == torch.bfloat16
    assert torch.equal(out_RN, torch.zeros(sum(counts), outputs, dtype=torch.bfloat16))
