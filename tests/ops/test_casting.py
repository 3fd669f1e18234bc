"""Casting rows: each token that there is, nothing else, and nothing at all where no cast is due."""

from __future__ import annotations

import pytest
import torch

from torch_eaas.errors import ConfigError
from torch_eaas.ops import casting

pytestmark = pytest.mark.usefixtures("poisoned_empty")

IMPLEMENTATION = pytest.mark.parametrize(
    "run", [casting._op, casting.launch], ids=["twin", "kernel"]
)


@IMPLEMENTATION
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [1, 63, 1030])
def test_every_token_is_cast_and_no_other_row(
    run: object, source: torch.dtype, target: torch.dtype, columns: int
) -> None:
    assert callable(run)
    made = torch.Generator().manual_seed(0)
    x_MK = torch.randn(12, columns, generator=made).to(source)
    num_tokens_S = torch.tensor([3, 0, 1, 2], dtype=torch.int32)
    out_MK = run(x_MK, target, num_tokens_S)
    assert out_MK.dtype == target
    held = [0, 1, 2, 6, 9, 10]
    assert torch.equal(out_MK[held], x_MK[held].to(target))
    rest = [row for row in range(12) if row not in held]
    assert bool(out_MK[rest].isnan().all())


@IMPLEMENTATION
def test_fp32_becomes_bf16_but_for_the_rounding_of_the_interpreter(run: object) -> None:
    assert callable(run)
    # exact in bf16: the interpreter cuts off where a GPU rounds
    x_MK = torch.tensor([[1.5, -2.25], [3.0, 0.0]])
    out_MK = run(x_MK, torch.bfloat16, torch.tensor([2], dtype=torch.int32))
    assert torch.equal(out_MK, x_MK.bfloat16())


def test_rows_of_the_wanted_dtype_are_returned_as_they_are() -> None:
    x_MK = torch.zeros(2, 3)
    assert casting.cast_rows(x_MK, torch.float32, torch.ones(2, dtype=torch.int32)) is x_MK


def test_rows_that_are_no_whole_number_a_slot_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"names 2 slots, which must be .* divide the 3 rows"):
        casting.cast_rows(torch.zeros(3, 1), torch.float16, torch.ones(2, dtype=torch.int32))
