"""The device's clock: the GPU's global timer, which the interpreter does not have."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.reference_server import read_clock_ref


def read_clock(now: Tensor) -> None:
    """Write the device's clock in microseconds to ``now``, ``(1,)`` int64.

    Kernels take the time from there, so a test can plan it.
    """
    check_tensor("now", now, (torch.int64,), 1)
    _op(now)


def launch(now: Tensor) -> None:
    """Run the kernel, on a GPU only."""
    with on_device(now):
        _clock_kernel[(1,)](now, num_warps=1)


@triton.jit
def clock_ns(HAS_TIMER: tl.constexpr) -> tl.tensor:
    """Return the GPU's global timer; in the interpreter there is none, and time stands still."""
    # the branch not taken is neither compiled nor interpreted
    return globaltimer().to(tl.int64) if HAS_TIMER else tl.full((), 0, tl.int64)


@triton.jit
def _clock_kernel(now: tl.tensor) -> None:
    """Read the global timer."""
    tl.store(now, globaltimer().to(tl.int64) // 1000)


_op = define_op(
    "read_clock(Tensor(a!) now) -> ()",
    kernel=launch,
    twin=read_clock_ref,
    fake=lambda now: None,
)
