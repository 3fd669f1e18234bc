"""A server's counters on the device: what it answered, added up without the host.

Shape suffixes: see ``pair_table``; C counters.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.reference_server import count_answers_ref
from torch_eaas.protocol.layout import Status


class Count(IntEnum):
    """What each counter counts; from ``STATUSES`` on, requests by their ``Status``."""

    ITERATIONS = 0
    BATCHES = 1
    """Iterations that ran experts for somebody."""
    TOKENS = 2
    EXPERTS_US = 3
    """Microseconds of those batches' experts."""
    STATUSES = 4


NUM_COUNTERS = Count.STATUSES + len(Status)

_ITERATIONS = tl.constexpr(int(Count.ITERATIONS))
_BATCHES = tl.constexpr(int(Count.BATCHES))
_TOKENS = tl.constexpr(int(Count.TOKENS))
_EXPERTS_US = tl.constexpr(int(Count.EXPERTS_US))
_STATUSES = tl.constexpr(int(Count.STATUSES))
_NUM_STATUSES = tl.constexpr(len(Status))


def count_answers(
    counters_C: Tensor, statuses_R: Tensor, num_tokens_R: Tensor, started: Tensor, now: Tensor
) -> None:
    """Add one iteration to the counters.

    Args:
        counters_C: The counters, in the order of ``Count``, int64.
        statuses_R: What each request was answered with, int32; -1 for no request.
        num_tokens_R: Tokens computed of each, int32.
        started: When the experts began, us, ``(1,)`` int64.
        now: When they had ended.

    Example:
        ``statuses=[0, 3, -1]`` and ``num_tokens=[2, 0, 0]`` within 5 us add 1 iteration, 1 batch,
        2 tokens, 5 us, 1 OK and 1 DRAINING.
    """
    for name, tensor in (("counters_C", counters_C), ("started", started), ("now", now)):
        check_tensor(name, tensor, (torch.int64,), 1)
    for name, tensor in (("statuses_R", statuses_R), ("num_tokens_R", num_tokens_R)):
        check_tensor(name, tensor, (torch.int32,), 1)
    _op(counters_C, statuses_R, num_tokens_R, started, now)


def launch(
    counters_C: Tensor, statuses_R: Tensor, num_tokens_R: Tensor, started: Tensor, now: Tensor
) -> None:
    """Run the kernel: one block."""
    with on_device(counters_C):
        _count_kernel[(1,)](
            counters_C,
            statuses_R,
            num_tokens_R,
            started,
            now,
            len(statuses_R),
            REQUESTS=triton.next_power_of_2(len(statuses_R)),
            num_warps=1,
        )


@triton.jit
def _add(counter: tl.tensor, number: tl.tensor) -> None:
    """Add to a counter of this block alone."""
    tl.store(counter, tl.load(counter) + number)


@triton.jit(do_not_specialize=["num_requests"])
def _count_kernel(
    counters_C: tl.tensor,
    statuses_R: tl.tensor,
    num_tokens_R: tl.tensor,
    started: tl.tensor,
    now: tl.tensor,
    num_requests: tl.tensor,
    REQUESTS: tl.constexpr,
) -> None:
    """Add up the requests of one iteration."""
    request = tl.arange(0, REQUESTS)
    statuses = tl.load(statuses_R + request, mask=request < num_requests, other=-1)
    tokens = tl.sum(tl.load(num_tokens_R + request, mask=request < num_requests, other=0), axis=0)
    # one thread's sum of a block's own counters: no other launch runs beside this one
    is_batch = (tokens > 0).to(tl.int64)
    _add(counters_C + _ITERATIONS, 1)
    _add(counters_C + _BATCHES, is_batch)
    _add(counters_C + _TOKENS, tokens.to(tl.int64))
    _add(counters_C + _EXPERTS_US, is_batch * (tl.load(now) - tl.load(started)))
    for status in tl.static_range(_NUM_STATUSES):
        _add(counters_C + _STATUSES + status, tl.sum((statuses == status).to(tl.int64), axis=0))


_op = define_op(
    "count_answers(Tensor(a!) counters_C, Tensor statuses_R, Tensor num_tokens_R, Tensor started, "
    "Tensor now) -> ()",
    kernel=launch,
    twin=count_answers_ref,
    fake=lambda *_: None,
)
