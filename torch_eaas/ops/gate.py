"""Gates: how a step that has failed ends early, and whole.

A wait that gives up sets the step's *abort word*. Each stage looks at its own *gate*, a copy of the
abort word that one block makes just before the stage. Were the blocks of a stage to look at the
abort word themselves, some could see it and some not: half a request would be written, and an
arrival counter left odd. So either the whole stage runs, or none of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.reference_client import close_gate_ref


def close_gate(abort: Tensor, gate: Tensor) -> None:
    """Copy the step's abort word into a stage's gate, both ``(1,)`` int64.

    Example:
        ``abort=[1]`` makes ``gate=[1]``: the stage behind it does nothing.
    """
    check_tensor("abort", abort, (torch.int64,), 1)
    check_tensor("gate", gate, (torch.int64,), 1)
    _op(abort, gate)


def launch(abort: Tensor, gate: Tensor) -> None:
    """Run the kernel: one block."""
    with on_device(abort):
        _gate_kernel[(1,)](abort, gate, num_warps=1)


@triton.jit
def _gate_kernel(abort: tl.tensor, gate: tl.tensor) -> None:
    """Copy one word."""
    tl.store(gate, tl.load(abort))


@triton.jit
def set_abort(abort: tl.tensor, word: tl.tensor) -> None:
    """Set the step's abort word unless another failure of the step has: the first one counts."""
    tl.atomic_cas(abort, tl.zeros((), tl.int64), word, sem="release", scope="gpu")


_op = define_op(
    "close_gate(Tensor abort, Tensor(a!) gate) -> ()",
    kernel=launch,
    twin=close_gate_ref,
    fake=lambda abort, gate: None,
)
