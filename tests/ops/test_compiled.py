"""The kernels as they compile for Hopper and Blackwell, and the ops as torch's tools see them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.ops.compiling import CAPABILITIES, compiled
from torch_eaas.ops import shrinking

LAUNCHES: dict[str, Callable[[], object]] = {
    "group_shrink 464": lambda: shrinking.launch(torch.zeros(464, dtype=torch.int32), 64),
    "group_shrink 65536": lambda: shrinking.launch(torch.zeros(65536, dtype=torch.int32), 64),
}

EACH = pytest.mark.parametrize("launch", LAUNCHES)


@pytest.mark.parametrize("capability", CAPABILITIES)
@EACH
def test_every_kernel_compiles_and_spills_nothing(launch: str, capability: int) -> None:
    kernels = [c for c in compiled(__name__) if (c.launch, c.capability) == (launch, capability)]
    assert kernels
    for kernel in kernels:
        assert f".target sm_{capability}" in kernel.ptx
        assert kernel.local_bytes == 0, kernel.kernel
        assert kernel.count(r"\b(ld|st)\.local") == 0, kernel.kernel
