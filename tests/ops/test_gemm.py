"""grouped_gemm and grouped_gemm_fp8 as users call them; the twins against sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_problems import TOLERANCE, Problem, problem
from torch_eaas.errors import ConfigError
from torch_eaas.ops import ActiveGroups, GemmConfig, grouped_gemm, grouped_gemm_fp8, quantize_blocks
from torch_eaas.ops.gemm import check_multiplies_fp8

pytestmark = pytest.mark.usefixtures("poisoned_empty", "one_thread")

NUMBER = pytest.mark.parametrize("number", ["fp32", "fp16", "bf16", "fp8"])


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def call(case: Problem, **more: Any) -> Tensor:
    """Call the public function, on CPU tensors."""
    slots_G = None if case.slots is None else int32(*case.slots)
    groups = ActiveGroups.of(int32(*case.counts), 16, slots_G)
    more = {"rows_R": case.rows_R, "gather_div": case.gather_div, **more}
    if case.number == "fp8":
        return grouped_gemm_fp8(case.x, case.weights, groups, **more)  # type: ignore[arg-type]
    return grouped_gemm(*case.x, *case.weights, groups, **more)


def by_hand(case: Problem) -> Tensor:
    """Multiply row by row in fp64, each number times its own factor."""
    x_MK, weights_SNK = case.x[0].double(), case.weights[0].double()
    _, outputs, inputs = weights_SNK.shape
    if case.number == "fp8":
        k, n = torch.arange(inputs) // 128, torch.arange(outputs) // 128
        x_MK = x_MK * case.x[1][:, k]
        weights_SNK = weights_SNK * case.weights[1][:, n][:, :, k]
    groups = [g for g, count in enumerate(case.counts) for _ in range(count)]
    out = torch.empty(len(groups), outputs, dtype=torch.float64)
    for row, group in enumerate(groups):
        source = row if case.rows_R is None else int(case.rows_R[row]) // case.gather_div
        slot = group if case.slots is None else case.slots[group]
        out[row] = weights_SNK[slot] @ x_MK[source]
    return out


@pytest.mark.parametrize(
    "counts", [[], [0], [1], [0, 3, 0, 5], [0] * 4, [1] * 7, [63, 0, 1], [2]], ids=str
)
@NUMBER
def test_the_twin_multiplies_each_row_with_its_groups_matrix(
    number: str, counts: list[int]
) -> None:
    case = problem(number, counts, 140, 150)
    out_RN = call(case, **({"out_dtype": torch.float32} if number == "fp8" else {}))
    assert out_RN.dtype == (torch.float32 if number == "fp8" else case.x[0].dtype)
    torch.testing.assert_close(out_RN.double(), by_hand(case), **TOLERANCE[number])


@NUMBER
def test_the_twin_gathers_rows_and_finds_matrices_in_their_slots(number: str) -> None:
    case = problem(number, [4, 0, 3], 140, 150).gathered([13, 0, 6, 7, 9, 10, 5], 2)
    case = replace(case, slots=(2, -1, 0))
    out_RN = call(case, **({"out_dtype": torch.float32} if number == "fp8" else {}))
    torch.testing.assert_close(out_RN.double(), by_hand(case), **TOLERANCE[number])


def test_fp8_gives_bf16_unless_told_otherwise() -> None:
    case = problem("fp8", [2, 1], 5, 150)
    assert torch.equal(call(case), call(case, out_dtype=torch.float32).bfloat16())


def test_the_examples_of_the_docstrings_hold() -> None:
    groups = ActiveGroups.of(int32(0, 2), 16)
    x_MK, weights_SNK = torch.tensor([[1.0], [2.0]]), torch.tensor([[[3.0]], [[5.0]]])
    assert grouped_gemm(x_MK, weights_SNK, groups).tolist() == [[5.0], [10.0]]
    gathered = grouped_gemm(x_MK, weights_SNK, groups, rows_R=int32(3, 0), gather_div=2)
    assert gathered.tolist() == [[10.0], [5.0]]
    row = torch.tensor([[448.0]]).to(torch.float8_e4m3fn), torch.tensor([[2.0]])
    matrix = torch.tensor([[[3.0]]]).to(torch.float8_e4m3fn), torch.tensor([[[0.5]]])
    # 1344 needs no more digits than bf16 has
    assert grouped_gemm_fp8(row, matrix, ActiveGroups.of(int32(1), 16)).tolist() == [[1344.0]]
    lists = ActiveGroups.of(int32(0, 3, 0, 40), 16)
    assert [part.tolist() for part in lists[1:5]] == [
        [1, 3, -1, -1],
        [0, 3, 43, 43],
        [0, 1, 4, 4],
        [2, 4, 43],
    ]


# -- as torch's tools see them -----------------------------------------------------------------


@pytest.mark.parametrize("gathers", [True, False])
@NUMBER
def test_opcheck_finds_no_fault(number: str, gathers: bool) -> None:
    case = problem(number, [2, 0, 3], 5, 130)
    if gathers:
        case = replace(case.gathered([4, 3, 2, 1, 0], 1), slots=(0, 1, 2))
    groups = ActiveGroups.of(int32(*case.counts), 16, int32(*case.slots) if case.slots else None)
    lists = (case.rows_R, groups.slots_G, *groups[:5], 1, 16, [64, 4, 4, 2, 1])
    if number == "fp8":
        numbers = (case.x[0], case.x[1], case.weights[0], case.weights[1])
        args = (*numbers, *lists, torch.bfloat16)
        # test_schema compares FP8 numbers, which torch cannot
        utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.torch_eaas.grouped_gemm_fp8.default, args, test_utils=utils)
    else:
        args = (*case.x, *case.weights, *lists)
        torch.library.opcheck(torch.ops.torch_eaas.grouped_gemm.default, args)


@NUMBER
def test_it_compiles_as_one_graph_from_counts_to_rows(number: str) -> None:
    def layer(x: tuple[Tensor, ...], weights: tuple[Tensor, ...], counts_G: Tensor) -> Tensor:
        groups = ActiveGroups.of(counts_G, 16)
        config = GemmConfig(batch_invariant=False, split_k=2)
        if number == "fp8":
            return grouped_gemm_fp8(x, weights, groups, config=config)  # type: ignore[arg-type]
        return grouped_gemm(*x, *weights, groups, config=config)

    case = problem(number, [2, 0, 3], 5, 130)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    args = (case.x, case.weights, int32(*case.counts))
    assert torch.equal(compiled(*args), layer(*args))


# -- what is refused ---------------------------------------------------------------------------


def _refusals() -> dict[str, tuple[Callable[[], object], str]]:
    bf16, fp8 = problem("bf16", [2, 1], 5, 150), problem("fp8", [2, 1], 200, 150)
    groups = ActiveGroups.of(int32(2, 1), 16)
    x, weights = bf16.x[0], bf16.weights[0]
    x8, w8 = fp8.x, fp8.weights

    def gemm(x_MK: Tensor = x, w_SNK: Tensor = weights, **more: Any) -> Tensor:
        lists = groups._replace(**{n: more.pop(n) for n in groups._fields if n in more})
        return grouped_gemm(x_MK, w_SNK, lists, **more)

    def gemm8(*, xs: Tensor = x8[1], ws: Tensor = w8[1], **more: Any) -> Tensor:
        return grouped_gemm_fp8((x8[0], xs), (w8[0], ws), groups, **more)

    return {
        "x of integers": (lambda: gemm(x.int()), "x_MK must be float32 or bfloat16 or float16"),
        "weights of another dtype": (
            lambda: gemm(x, weights.float()),
            "weights_SNK must be bfloat16",
        ),
        "one matrix": (lambda: gemm(x, weights[0]), "weights_SNK must have 3 dimensions"),
        "x of other inputs": (
            lambda: gemm(x[:, :64].contiguous()),
            r"x_MK has 64 inputs a row, but weights_SNK of shape \(2, 5, 150\) needs 150",
        ),
        "x with gaps": (lambda: gemm(x[:, ::2]), "x_MK must be contiguous"),
        "rows of int64": (
            lambda: gemm(rows_R=torch.zeros(3, dtype=torch.int64)),
            "rows_R must be int32, got torch.int64",
        ),
        "no divisor": (
            lambda: gemm(gather_div=0),
            "gather_div must be an integer of at least 1, got 0",
        ),
        "slots of other groups": (
            lambda: gemm(slots_G=int32(0)),
            r"slots_G must have shape \(2,\), got \(1,\)",
        ),
        "totals of four": (
            lambda: gemm(totals_3=int32(0, 0, 0, 0)),
            r"totals_3 must have shape \(3,\), got \(4,\)",
        ),
        "counts of int64": (
            lambda: gemm(counts_G=torch.zeros(2, dtype=torch.int64)),
            "counts_G must be int32",
        ),
        "tiles of 48 rows": (
            lambda: gemm(block_rows=48),
            "block_rows must be one of 16, 32, 64, 128, 256, got 48",
        ),
        "a factor for each number": (
            lambda: gemm8(xs=torch.ones(3, 150)),
            r"x\[1\] must have shape \(3, 2\), got \(3, 150\)",
        ),
        "one factor for each matrix": (
            lambda: gemm8(ws=torch.ones(2, 1, 1)),
            r"weights\[1\] must have shape \(2, 2, 2\), got \(2, 1, 1\)",
        ),
        "factors in bf16": (
            lambda: gemm8(xs=torch.ones(3, 2).bfloat16()),
            r"x\[1\] must be float32, got torch.bfloat16",
        ),
        "fp8 for fp16": (
            lambda: gemm8(out_dtype=torch.float16),
            "out_dtype must be torch.bfloat16 or torch.float32, got torch.float16",
        ),
    }


@pytest.mark.parametrize("name", _refusals())
def test_what_does_not_fit_is_refused_in_words(name: str) -> None:
    refused, message = _refusals()[name]
    with pytest.raises(ConfigError, match=message):
        refused()


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    message = "FP8 needs a GPU of compute capability 8.9 or more, cuda:1 has 8.6; store the weights"
    with pytest.raises(ConfigError, match=message):
        check_multiplies_fp8(torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_multiplies_fp8(torch.device("cuda", 1))


def test_the_quantiser_gives_what_the_gemm_takes() -> None:
    x, weight = (
        quantize_blocks(torch.ones(2, 130), (1, 128)),
        quantize_blocks(torch.ones(3, 130), (128, 128)),
    )
    weights = weight[0][None], weight[1][None]
    out_RN = grouped_gemm_fp8(x, weights, ActiveGroups.of(int32(2), 16))
    assert torch.equal(out_RN, torch.full((2, 3), 130.0, dtype=torch.bfloat16))
