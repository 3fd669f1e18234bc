"""The server copies its requests' hidden states out of the windows on the GPU, bit by bit.

It may: any bits of them, and of their scales in fp8, are numbers. A grouped GEMM gathers rows from
one tensor, not from windows.

Shape suffixes: see ``pair_table``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.ops.launching import (
    WIRE_DTYPES,
    check_scales,
    check_tensor,
    define_op,
    on_device,
)
from torch_eaas.ops.pair_table import ServerTables
from torch_eaas.ops.reference_server import read_hidden_ref
from torch_eaas.ops.windows import (
    HIDDEN_OFFSET,
    SCALES_OFFSET,
    alignment_of,
    of_pair,
    request_slot_at,
    scale_units,
    units_of,
)

_BLOCK = 2048


def read_hidden(
    tables: ServerTables,
    ready_R: Tensor,
    num_tokens_R: Tensor,
    x_RTD: Tensor,
    *,
    blocks: int = 1,
    scales_RTd: Tensor | None = None,
) -> None:
    """Copy the hidden states of the requests that ``read_requests`` took.

    Args:
        tables: The server's pairs.
        ready_R: What ``scan_slots`` listed.
        num_tokens_R: Tokens of each request, int32, 0 in what was refused.
        x_RTD: Where they go, in the pairs' wire dtype; only tokens that there are, are written.
        blocks: Thread blocks that share one request's rows.
        scales_RTd: Where their scales go, fp32, if the wire dtype is fp8.

    Raises:
        ConfigError: Another dtype, shape or layout, or scales and the wire dtype do not fit.

    Example:
        Of two requests with ``num_tokens=[1, 0]``, ``x[0, 0]`` is written and nothing else.
    """
    check_tensor("ready_R", ready_R, (torch.int32,), 1)
    check_tensor("num_tokens_R", num_tokens_R, (torch.int32,), 1)
    check_tensor("x_RTD", x_RTD, WIRE_DTYPES, 3)
    check_scales("scales_RTd", scales_RTd, x_RTD)
    check_at_least("blocks", blocks, 1)
    _op(tables.pairs_PC, tables.book_3PS, ready_R, num_tokens_R, x_RTD, scales_RTd, blocks)


def launch(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    ready_R: Tensor,
    num_tokens_R: Tensor,
    x_RTD: Tensor,
    scales_RTd: Tensor | None,
    blocks: int,
) -> None:
    """Run the kernel: ``blocks`` programs a request."""
    x_NU = units_of(x_RTD.flatten(0, 1))
    scales_Nd = None if scales_RTd is None else scales_RTd.flatten(0, 1).view(torch.int32)
    with on_device(pairs_PC):
        _read_kernel[(len(ready_R), blocks)](
            pairs_PC,
            ready_R,
            num_tokens_R,
            x_NU,
            scales_Nd,
            book_3PS.shape[2],
            x_RTD.shape[1],
            UNITS=x_NU.shape[1],
            UNIT_BYTES=x_NU.element_size(),
            ALIGNED=alignment_of(x_NU),
            **scale_units(scales_Nd),
            BLOCK=_BLOCK,
            num_warps=8,
        )


@triton.jit(do_not_specialize=["num_slots", "max_tokens"])
def _read_kernel(
    pairs_PC: tl.tensor,
    ready_R: tl.tensor,
    num_tokens_R: tl.tensor,
    x_NU: tl.tensor,
    scales_Nd: tl.tensor,
    num_slots: tl.tensor,
    max_tokens: tl.tensor,
    UNITS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_ALIGNED: tl.constexpr,
    SCALES_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy each ``blocks``-th row of one request."""
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    num_tokens = tl.load(num_tokens_R + request).to(tl.int64)
    if num_tokens > 0:
        entry = tl.load(ready_R + request)
        pair = (entry // num_slots).to(tl.int64)
        slot = (entry % num_slots).to(tl.int64)
        slot_at = request_slot_at(pairs_PC, pair, slot)
        hidden_at = slot_at + of_pair(pairs_PC, pair, HIDDEN_OFFSET)
        scales_at = slot_at + of_pair(pairs_PC, pair, SCALES_OFFSET)
        for token in range(block, num_tokens, tl.num_programs(1)):
            row = request * max_tokens + token
            row_at = hidden_at + token * (UNITS * UNIT_BYTES)
            _fetch(row_at, x_NU + row * UNITS, UNITS, ALIGNED, BLOCK)
            if scales_Nd is not None:
                row_at = scales_at + token * (SCALES * 4)
                _fetch(row_at, scales_Nd + row * SCALES, SCALES, SCALES_ALIGNED, SCALES_BLOCK)


@triton.jit
def _fetch(
    row_at: tl.tensor,
    target: tl.tensor,
    UNITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy one row of units from an address to a pointer."""
    source = tl.multiple_of(row_at.to(target.dtype), ALIGNED)
    for start in range(0, UNITS, BLOCK):
        unit = start + tl.arange(0, BLOCK)
        tl.store(
            target + unit, tl.load(source + unit, mask=unit < UNITS, other=0), mask=unit < UNITS
        )


_op = define_op(
    "read_hidden(Tensor pairs_PC, Tensor book_3PS, Tensor ready_R, Tensor num_tokens_R, "
    "Tensor(a!) x_RTD, Tensor(b!)? scales_RTd, int blocks) -> ()",
    kernel=launch,
    twin=read_hidden_ref,
    fake=lambda *_: None,
)
