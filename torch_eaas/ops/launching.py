"""What every op needs: its registration, its tensors' checks, and the size of its grid.

A grid is fixed by what the host knows (shapes and the device), never by a count on the device, so
that a CUDA graph replays it: a few blocks for each multiprocessor walk over whatever there is.
Sizes that change while a server runs (rows, slots, groups) are marked ``do_not_specialize`` in the
kernels: Triton would compile anew, in the middle of a request, when one becomes 1 or odd.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.protocol.layout import SCALE_COLUMNS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of hidden states."""

WIRE_DTYPES = (*FLOATS, torch.float8_e4m3fn)
"""Dtypes in which hidden states travel."""

_LIBRARY = torch.library.Library("torch_eaas", "FRAGMENT")

_INTERPRETED_BLOCKS = 3
"""Blocks of a walking grid in Triton's interpreter: few, and enough to share work unevenly."""


def define_op(
    schema: str, *, kernel: Callable[..., Any], twin: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Register an op in ``torch.ops.torch_eaas`` and return it.

    Args:
        schema: Name, arguments and results, as ``torch.library.Library.define`` takes them.
        kernel: What runs on CUDA tensors.
        twin: What runs on CPU tensors; it defines the op.
        fake: What gives the results' shapes and dtypes.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CUDA")
    _LIBRARY.impl(name, twin, "CPU")
    torch.library.register_fake(f"torch_eaas::{name}", fake, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.torch_eaas, name).default
    return op


def check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], ndim: int) -> None:
    """Refuse a tensor that a kernel would misread.

    Raises:
        ConfigError: It has another dtype or number of dimensions, or is not contiguous.
    """
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ConfigError(f"{name} must be {wanted}, got {tensor.dtype}; cast it first")
    if tensor.ndim != ndim:
        raise ConfigError(f"{name} must have {ndim} dimensions, got shape {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ConfigError(
            f"{name} must be contiguous, got strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}; call .contiguous() first"
        )


def check_scales(name: str, scales: Tensor | None, rows: Tensor) -> None:
    """Refuse scales that do not belong to rows: fp8 has one for each 128 numbers, others have none.

    Raises:
        ConfigError: Scales are missing, or there are some, or they have another dtype or shape.
    """
    is_fp8 = rows.dtype == torch.float8_e4m3fn
    if is_fp8 != (scales is not None):
        raise ConfigError(
            f"{name} belongs to rows of float8_e4m3fn and to no others, got "
            f"{'none' if scales is None else 'some'} for {rows.dtype}; quantize_rows makes both"
        )
    if scales is None:
        return
    check_tensor(name, scales, (torch.float32,), rows.ndim)
    expected = (*rows.shape[:-1], -(-rows.shape[-1] // SCALE_COLUMNS))
    if tuple(scales.shape) != expected:
        raise ConfigError(
            f"{name} must have shape {expected} beside rows of shape {tuple(rows.shape)}, "
            f"got {tuple(scales.shape)}"
        )


def check_slots(num_tokens_S: Tensor | None, num_rows: int) -> None:
    """Refuse counts of tokens that do not divide rows into equal slots.

    Raises:
        ConfigError: Another dtype, shape or layout, or no whole number of rows per slot.
    """
    if num_tokens_S is None:
        return
    check_tensor("num_tokens_S", num_tokens_S, (torch.int32,), 1)
    if num_tokens_S.shape[0] == 0 or num_rows % num_tokens_S.shape[0]:
        raise ConfigError(
            f"num_tokens_S names {num_tokens_S.shape[0]} slots, which must be at least 1 and "
            f"divide the {num_rows} rows"
        )


def blocks_on(device: torch.device, per_multiprocessor: int) -> int:
    """Return how many blocks a walking grid has, whatever the counts are."""
    if device.type != "cuda":
        return _INTERPRETED_BLOCKS
    return per_multiprocessor * _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's GPU the current one: Triton launches there, whatever its arguments say."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
