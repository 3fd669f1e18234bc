"""The server takes requests out of its windows on the GPU: each header and id is copied once.

A client may write into a window at any time, so what is checked is the copy, and what is used is
what was checked. The checks and their order are those of ``docs/protocol.md``, section 7.

Shape suffixes: see ``pair_table``; L layers, E experts a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.pair_table import ServerTables
from torch_eaas.ops.reference_server import NO_REQUEST, read_requests_ref
from torch_eaas.ops.windows import (
    BEHIND_HEADER,
    EPOCH,
    INSTANCE,
    MAX_TOKENS,
    REQUEST_BUDGET,
    REQUEST_EPOCH,
    REQUEST_FLAGS,
    REQUEST_INSTANCE,
    REQUEST_LAYER,
    REQUEST_SEQUENCE,
    REQUEST_TOKENS,
    REQUEST_VERSION,
    REQUESTS,
    WEIGHTS_OFFSET,
    load_4,
    load_8,
    of_pair,
    request_slot_at,
    word_at,
)
from torch_eaas.ops.words import is_newer, load_word, sequence_of
from torch_eaas.protocol.layout import REQUEST_FIELDS, Status

_FIELDS = tl.constexpr(len(REQUEST_FIELDS))
_NO_REQUEST = tl.constexpr(NO_REQUEST)
_OK = tl.constexpr(int(Status.OK))
_UNKNOWN_EXPERT = tl.constexpr(int(Status.UNKNOWN_EXPERT))
_BAD_REQUEST = tl.constexpr(int(Status.BAD_REQUEST))
_DRAINING = tl.constexpr(int(Status.DRAINING))
_OVERLOADED = tl.constexpr(int(Status.OVERLOADED))
_EXPIRED = tl.constexpr(int(Status.EXPIRED))
_STALE = tl.constexpr(int(Status.STALE))

_BLOCK = 1024
"""Ids that a block loads at once: at least one a thread, so that no two threads load the same."""


class Requests(NamedTuple):
    """Requests as they were taken: copies, in the shapes that ``pack`` takes."""

    headers_RF: Tensor
    """Int64, in the order of ``REQUEST_FIELDS``; 0 for no request."""
    statuses_R: Tensor
    """What each request is answered with, int32: a ``Status``, or -1 for no request."""
    layers_R: Tensor
    """Int32."""
    num_tokens_R: Tensor
    """Tokens to compute, int32: 0 in what is refused."""
    ids_RTK: Tensor
    """Expert ids, int32; of a refused request they mean nothing."""
    weights_RTK: Tensor
    """Router weights, fp32; those beside an id of -1 mean nothing."""


def read_requests(
    tables: ServerTables,
    ready_R: Tensor,
    now: Tensor,
    draining: Tensor,
    groups_LE: Tensor,
    *,
    max_tokens: int,
    top_k: int,
    tokens_R: Tensor | None = None,
) -> Requests:
    """Take the listed requests: copy header, ids and weights, and check the copies.

    Args:
        tables: The server's pairs; the slots listed become taken.
        ready_R: What ``scan_slots`` listed.
        now: The clock in us, ``(1,)`` int64.
        draining: ``(1,)`` int32: if it is not 0, every request is refused.
        groups_LE: The group of each expert of each layer, ``(L, E)`` int32, -1 where it is not
            held.
        max_tokens: T, the most tokens of a request of any pair.
        top_k: K.
        tokens_R: Tokens that each was admitted with, int32: one that has more by now is answered
            OVERLOADED, since there may be no room for it. None: there is room for all.

    Example:
        ``groups=[[5, -1]]``: a request of layer 0 with ids ``[[0, -1]]`` has the status 0, OK; one
        with ids ``[[0, 1]]`` has 1, UNKNOWN_EXPERT, and its ``num_tokens`` is 0.
    """
    check_tensor("ready_R", ready_R, (torch.int32,), 1)
    check_tensor("groups_LE", groups_LE, (torch.int32,), 2)
    check_at_least("max_tokens", max_tokens, 1)
    check_at_least("top_k", top_k, 1)
    if tokens_R is not None:
        check_tensor("tokens_R", tokens_R, (torch.int32,), 1)
    books = (tables.pairs_PC, tables.book_3PS)
    lists = (ready_R, now, draining, groups_LE)
    return Requests(*_op(*books, *lists, max_tokens, top_k, tokens_R))


def launch(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    ready_R: Tensor,
    now: Tensor,
    draining: Tensor,
    groups_LE: Tensor,
    max_tokens: int,
    top_k: int,
    tokens_R: Tensor | None,
) -> tuple[Tensor, ...]:
    """Run the kernel: one program a request."""
    outputs = _fake(pairs_PC, book_3PS, ready_R, now, draining, groups_LE, max_tokens, top_k)
    with on_device(pairs_PC):
        _read_kernel[(len(ready_R),)](
            pairs_PC,
            book_3PS,
            ready_R,
            now,
            draining,
            groups_LE,
            tokens_R,
            *outputs,
            *book_3PS.shape[1:],
            *groups_LE.shape,
            max_tokens,
            TOP_K=top_k,
            BLOCK=_BLOCK,
        )
    return outputs


def _fake(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    ready_R: Tensor,
    now: Tensor,
    draining: Tensor,
    groups_LE: Tensor,
    max_tokens: int,
    top_k: int,
    *_: object,
) -> tuple[Tensor, ...]:
    requests = len(ready_R)
    return (
        pairs_PC.new_empty((requests, len(REQUEST_FIELDS))),
        ready_R.new_empty(requests),
        ready_R.new_empty(requests),
        ready_R.new_empty(requests),
        ready_R.new_empty((requests, max_tokens, top_k)),
        ready_R.new_empty((requests, max_tokens, top_k), dtype=torch.float32),
    )


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "num_layers", "num_experts", "max_tokens"])
def _read_kernel(
    pairs_PC: tl.tensor,
    book_3PS: tl.tensor,
    ready_R: tl.tensor,
    now: tl.tensor,
    draining: tl.tensor,
    groups_LE: tl.tensor,
    tokens_R: tl.tensor,
    headers_RF: tl.tensor,
    statuses_R: tl.tensor,
    layers_R: tl.tensor,
    num_tokens_R: tl.tensor,
    ids_RTK: tl.tensor,
    weights_RTK: tl.tensor,
    num_pairs: tl.tensor,
    num_slots: tl.tensor,
    num_layers: tl.tensor,
    num_experts: tl.tensor,
    max_tokens: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Read one request: word, header, then the rows that the header's copy allows."""
    request = tl.program_id(0).to(tl.int64)
    entry = tl.load(ready_R + request)
    status = _NO_REQUEST
    num_rows = 0
    layer = tl.full((), 0, tl.int64)
    slot_at = tl.full((), 0, tl.int64)
    weights_at = tl.full((), 0, tl.int64)
    if entry >= 0:
        pair = (entry // num_slots).to(tl.int64)
        slot = (entry % num_slots).to(tl.int64)
        # acquired: the header is loaded after it
        word = load_word(word_at(pairs_PC, pair, slot, REQUESTS))
        since_PS = book_3PS + num_pairs * num_slots + entry
        tl.store(since_PS + num_pairs * num_slots, word)

        slot_at = request_slot_at(pairs_PC, pair, slot)
        weights_at = slot_at + of_pair(pairs_PC, pair, WEIGHTS_OFFSET)
        header_F = headers_RF + request * _FIELDS
        tl.store(header_F + 0, load_8(slot_at + REQUEST_INSTANCE))
        tl.store(header_F + 1, load_8(slot_at + REQUEST_EPOCH))
        tl.store(header_F + 2, load_8(slot_at + REQUEST_SEQUENCE))
        tl.store(header_F + 3, load_8(slot_at + REQUEST_VERSION))
        tl.store(header_F + 4, load_8(slot_at + REQUEST_BUDGET))
        tl.store(header_F + 5, load_4(slot_at + REQUEST_LAYER))
        tl.store(header_F + 6, load_4(slot_at + REQUEST_TOKENS))
        tl.store(header_F + 7, load_4(slot_at + REQUEST_FLAGS))
        # each thread has loaded for itself: the copy is what one of them stored
        tl.debug_barrier()
        instance = tl.load(header_F + 0)
        epoch = tl.load(header_F + 1)
        sequence = tl.load(header_F + 2)
        budget_us = tl.load(header_F + 4)
        layer = tl.load(header_F + 5)
        num_tokens = tl.load(header_F + 6)
        flags = tl.load(header_F + 7)

        is_late = is_newer(tl.load(now) - tl.load(since_PS), budget_us)
        limit = tl.minimum(of_pair(pairs_PC, pair, MAX_TOKENS), max_tokens)
        is_bad = (num_tokens < 1) | (num_tokens > limit) | (flags != 0)
        is_ours = (instance == of_pair(pairs_PC, pair, INSTANCE)) & (sequence == sequence_of(word))
        is_ours = is_ours & (epoch == of_pair(pairs_PC, pair, EPOCH))
        # the last to be set is the first to count
        status = _OK
        if tokens_R is not None:
            status = tl.where(num_tokens > tl.load(tokens_R + request), _OVERLOADED, _OK)
        status = tl.where(is_late, _EXPIRED, status)
        status = tl.where(is_bad, _BAD_REQUEST, status)
        status = tl.where(is_ours, status, _STALE)
        status = tl.where(tl.load(draining) != 0, _DRAINING, status)
        if status == _OK:
            num_rows = num_tokens.to(tl.int32) * TOP_K
    else:
        fields = tl.arange(0, _FIELDS)
        tl.store(headers_RF + request * _FIELDS + fields, tl.zeros((_FIELDS,), tl.int64))

    # rows of nobody, or of a refused header, are none without a look into the window
    ids_N = ids_RTK + request * max_tokens * TOP_K
    weights_N = weights_RTK + request * max_tokens * TOP_K
    lowest = 0
    unknown = 0
    for start in range(0, max_tokens * TOP_K, BLOCK):
        row = start + tl.arange(0, BLOCK)
        is_row = row < num_rows
        ids_at = (slot_at + BEHIND_HEADER + row * 4).to(tl.pointer_type(tl.int32))
        ids = tl.load(ids_at, mask=is_row, other=-1, volatile=True)
        weight_at = (weights_at + row * 4).to(tl.pointer_type(tl.float32))
        weights = tl.load(weight_at, mask=is_row, other=0.0)
        is_known = (ids >= 0) & (ids < num_experts) & (layer < num_layers)
        group = tl.load(groups_LE + layer * num_experts + ids, mask=is_known, other=-1)
        lowest = tl.minimum(lowest, tl.min(ids, axis=0))
        unknown = tl.maximum(unknown, tl.max(((ids >= 0) & (group < 0)).to(tl.int32), axis=0))
        tl.store(ids_N + row, ids, mask=row < max_tokens * TOP_K)
        tl.store(weights_N + row, weights, mask=row < max_tokens * TOP_K)
    if (lowest < -1) | (unknown > 0):
        status = tl.where(lowest < -1, _BAD_REQUEST, _UNKNOWN_EXPERT)
        num_rows = 0
    tl.store(statuses_R + request, status)
    tl.store(layers_R + request, layer)
    tl.store(num_tokens_R + request, num_rows // TOP_K)


_op = define_op(
    "read_requests(Tensor pairs_PC, Tensor(a!) book_3PS, Tensor ready_R, Tensor now, "
    "Tensor draining, Tensor groups_LE, int max_tokens, int top_k, Tensor? tokens_R) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel=launch,
    twin=read_requests_ref,
    fake=_fake,
)
