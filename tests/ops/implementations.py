"""The ops of the device path run as kernels, in Triton's interpreter, or as their plain twins.

On CPU tensors an op runs its twin. ``use_kernels`` puts the kernels in their place.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import triton

from torch_eaas.ops import (
    add_replies,
    choose_replicas,
    gate,
    put_slots,
    read_hidden,
    read_requests,
    share_tokens,
    signal,
    slot_scan,
    write_replies,
    write_requests,
)

MODULES: tuple[ModuleType, ...] = (
    add_replies,
    choose_replicas,
    gate,
    put_slots,
    read_hidden,
    read_requests,
    share_tokens,
    signal,
    slot_scan,
    write_replies,
    write_requests,
)


def use_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let every op of the device path run its kernel, on CPU tensors."""
    if isinstance(gate._gate_kernel, triton.JITFunction):
        pytest.skip("kernels run on CPU tensors with TRITON_INTERPRET=1 only")
    for module in MODULES:
        patch.setattr(module, "_op", module.launch)
    patch.setattr(put_slots, "_reply_op", put_slots.launch_replies)


@pytest.fixture(params=["kernels", "twins"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test once with the kernels and once with the twins."""
    name: str = request.param
    if name == "kernels":
        use_kernels(monkeypatch)
    return name
