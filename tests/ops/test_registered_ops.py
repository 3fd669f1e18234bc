"""The ops as torch sees them: opcheck, torch.compile, the public function against the twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_eaas import ops
from torch_eaas.ops import reference


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


PACKED = (ints([[[1, 0], [0, -1]], [[1, 1], [0, 0]]]), ints([0, 1]), ints([2, 1]))
PLACES = ints([[2, 0], [1, -1]])

# name, what the op is called with, and the twin
CASES: list[tuple[str, tuple[Any, ...], Callable[..., Any]]] = [
    ("group_shrink", (ints([0, 3, 0, 5]), 4), reference.group_shrink_ref),
    ("pack", (*PACKED, ints([[0, 1], [2, -1]]), 3), reference.pack_ref),
    ("quantize_rows", (random(3, 130), 128, None), reference.quantize_rows_ref),
    ("quantize_rows", (random(4, 130), 128, ints([2, 2])), reference.quantize_rows_ref),
    ("dequantize_rows", (*reference.quantize_rows_ref(random(3, 130), 128, None), None,
     torch.float32), reference.dequantize_rows_ref),
    ("swiglu", (random(3, 10).bfloat16(), None), reference.swiglu_rows_ref),
    ("swiglu", (random(3, 10), ints([1, 1, 3])), reference.swiglu_rows_ref),
    ("swiglu_quantize", (random(3, 260), None), reference.swiglu_quantize_ref),
    ("combine_rows", (random(3, 5), PLACES, random(2, 2), False, None), reference.combine_rows_ref),
    ("combine_rows", (random(3, 5), PLACES, random(2, 2), True, ints([1, 1])),
     reference.combine_rows_ref),
]  # fmt: skip
EACH = pytest.mark.parametrize(
    ("name", "given", "twin"), CASES, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)]
)

CALLS: dict[str, Callable[..., Any]] = {
    "quantize_rows": lambda x, block, counts: ops.quantize_rows(x, block, num_tokens_S=counts),
    "dequantize_rows": lambda x, scale, counts, dtype: ops.dequantize_rows(
        x, scale, num_tokens_S=counts, dtype=dtype
    ),
    "combine_rows": lambda rows, places, weights, per_expert, counts: ops.combine_rows(
        rows, places, weights, per_expert=per_expert, num_tokens_S=counts
    ),
}
"""How the public function is called, where its arguments are not the op's."""


def checks_of(given: tuple[Any, ...]) -> tuple[str, ...]:
    """Return what ``opcheck`` can check: one of its tests compares inputs, and FP8 cannot be."""
    is_fp8 = any(isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn for x in given)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    return checks if is_fp8 else ("test_schema", *checks)


def op_of(name: str) -> Any:
    """Return the op; loading the public function registers it."""
    assert getattr(ops, name)
    return getattr(torch.ops.torch_eaas, name).default


def assert_close(got: Any, expected: Any, rtol: float = 0.0) -> None:
    pairs = [(got, expected)] if isinstance(got, Tensor) else zip(got, expected, strict=True)
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu().float(), theirs.float(), rtol=rtol, atol=0)


@EACH
def test_the_op_keeps_torchs_rules(
    name: str, given: tuple[Any, ...], twin: Callable[..., Any]
) -> None:
    torch.library.opcheck(op_of(name), given, test_utils=checks_of(given))


@EACH
def test_on_a_cpu_the_public_function_is_the_twin_compiled_or_not(
    name: str, given: tuple[Any, ...], twin: Callable[..., Any]
) -> None:
    public = CALLS.get(name, getattr(ops, name))
    expected = twin(*given)
    assert_close(public(*given), expected)
    assert_close(torch.compile(public, fullgraph=True, backend="aot_eager")(*given), expected)


# -- where there is a GPU: run these without TRITON_INTERPRET --------------------------------------

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def on_gpu(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.cuda() if isinstance(value, Tensor) else value for value in given)


@pytest.mark.gpu
@GPU
@EACH
def test_on_a_gpu_the_kernel_gives_what_the_twin_gives(
    name: str, given: tuple[Any, ...], twin: Callable[..., Any]
) -> None:
    # the exponential differs in its last bits, and then a number may round to the next one
    rtol = {"swiglu": 1e-2, "swiglu_quantize": 0.13}.get(name, 0.0)
    assert_close(op_of(name)(*on_gpu(given)), twin(*given), rtol)


@pytest.mark.gpu
@GPU
def test_a_captured_graph_packs_and_shrinks_whatever_its_inputs_hold() -> None:
    ids, layers, num_tokens = on_gpu(PACKED)
    groups_LE = ints([[0, 1], [2, -1]]).cuda()

    def step() -> tuple[Tensor, ...]:
        packed = ops.pack(ids, layers, num_tokens, groups_LE, 3)
        return (*packed, *ops.group_shrink(packed[2], 2))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for counts in ([2, 1], [0, 2], [0, 0], [1, 0]):
        num_tokens.copy_(ints(counts))
        graph.replay()
        packed = reference.pack_ref(*PACKED[:2], ints(counts), groups_LE.cpu(), 3)
        expected = (*packed, *reference.group_shrink_ref(packed[2], 2))
        assert_close(got, expected)
