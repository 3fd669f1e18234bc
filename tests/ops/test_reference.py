"""The plain twins against loops over single numbers; what is left unwritten holds NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_eaas.ops.reference import (
    swiglu_ref,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
