"""The ops of the device path run as kernels, in Triton's interpreter, or as their plain twins.

On CPU tensors an op runs its twin. ``use_kernels`` puts the kernels in their place.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import triton

from torch_eaas.ops import (
    activation,
    add_replies,
    answer_counts,
    casting,
    choose_replicas,
    combining,
    gemm,
    packing,
    put_slots,
    read_hidden,
    read_requests,
    read_text,
    row_dequantizer,
    share_tokens,
    shrinking,
    signal,
    slot_scan,
    write_replies,
    write_requests,
)

MODULES: tuple[ModuleType, ...] = (
    add_replies,
    answer_counts,
    choose_replicas,
    put_slots,
    read_hidden,
    read_requests,
    read_text,
    share_tokens,
    signal,
    slot_scan,
    write_replies,
    write_requests,
)

ARITHMETIC: tuple[ModuleType, ...] = (
    casting,
    combining,
    gemm,
    packing,
    row_dequantizer,
    shrinking,
)


def use_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let every op of the device path run its kernel, on CPU tensors."""
    if isinstance(signal._wait_kernel, triton.JITFunction):
        pytest.skip("kernels run on CPU tensors with TRITON_INTERPRET=1 only")
    for module in MODULES:
        patch.setattr(module, "_op", module.launch)
    patch.setattr(put_slots, "_reply_op", put_slots.launch_replies)


def use_all_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let the experts run their kernels too; not in FP8, whose casts the interpreter gets wrong."""
    use_kernels(patch)
    for module in ARITHMETIC:
        patch.setattr(module, "_op", module.launch)
    patch.setattr(activation, "_swiglu_op", activation.launch)


@pytest.fixture(params=["kernels", "twins"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test once with the kernels and once with the twins."""
    name: str = request.param
    if name == "kernels":
        use_kernels(monkeypatch)
    return name
