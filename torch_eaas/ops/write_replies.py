"""The server answers requests on the GPU: rows or an error's text, header, then the word.

Shape suffixes: see ``pair_table``; N rows of all answers, X statuses, B bytes of a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.ops.clock import clock_ns
from torch_eaas.ops.launching import check_slots, check_tensor, define_op, on_device
from torch_eaas.ops.pair_table import ServerTables
from torch_eaas.ops.reference_server import write_replies_ref
from torch_eaas.ops.windows import (
    BEHIND_HEADER,
    EPOCH,
    INSTANCE,
    REPLIES,
    REPLY_EPOCH,
    REPLY_EXPERTS,
    REPLY_INSTANCE,
    REPLY_QUEUE,
    REPLY_SEQUENCE,
    REPLY_SIZE,
    REPLY_STATUS,
    REPLY_VERSION,
    alignment_of,
    arrive,
    copy_units,
    of_pair,
    reply_slot_at,
    store_4,
    store_8,
    units_of,
    word_at,
)
from torch_eaas.ops.words import response_word, sequence_of, store_word
from torch_eaas.protocol.layout import ALIGN, Status

_BLOCK = 2048
_OK = tl.constexpr(int(Status.OK))
_TEXT_BYTES = tl.constexpr(ALIGN)
_LONGEST_TIME = tl.constexpr((1 << 32) - 1)

_TEXTS = {
    Status.OK: "",
    Status.UNKNOWN_EXPERT: "an expert of this layer is not held here",
    Status.BAD_REQUEST: "tokens, flags or an expert id are not what this window takes",
    Status.DRAINING: "this server is leaving; ask another holder",
    Status.OVERLOADED: "this server refuses load now; ask another holder",
    Status.EXPIRED: "the request's time was over when it was seen",
    Status.INTERNAL: "the server's batch failed",
    Status.STALE: "instance, epoch or sequence is not this window's, this word's",
}


@dataclass(frozen=True, slots=True)
class Answers:
    """What a batch is answered with."""

    ready_R: Tensor
    """The slots, as ``scan_slots`` listed them, int32."""
    statuses_R: Tensor
    """A ``Status`` for each, int32; -1 for no request."""
    num_tokens_R: Tensor
    """Tokens of each request, int32."""
    rows_ND: Tensor
    """The rows, in the pairs' reply dtype: N / R places a request, of which it fills the first."""

    def __post_init__(self) -> None:
        check_tensor("ready_R", self.ready_R, (torch.int32,), 1)
        check_tensor("statuses_R", self.statuses_R, (torch.int32,), 1)
        check_tensor("num_tokens_R", self.num_tokens_R, (torch.int32,), 1)
        check_tensor("rows_ND", self.rows_ND, (torch.float32, torch.bfloat16), 2)
        check_slots(self.num_tokens_R, len(self.rows_ND))


def refusal_texts(device: torch.device | str = "cpu") -> Tensor:
    """Return what each status says where rows would be, ``(X, B)`` uint8, filled up with 0.

    A kernel knows no more of what was wrong than the status; a host's text names it.
    """
    texts = [_TEXTS[status].encode().ljust(ALIGN, b"\0") for status in Status]
    return torch.tensor([list(text) for text in texts], dtype=torch.uint8, device=device)


def write_replies(
    tables: ServerTables,
    answers: Answers,
    texts_XB: Tensor,
    arrivals_R: Tensor,
    *,
    started: Tensor,
    now: Tensor | None = None,
    version: Tensor,
    rows_per_token: int = 1,
    blocks: int = 1,
) -> None:
    """Answer every request of a batch, all in one launch; the word comes last.

    Args:
        tables: The server's pairs; a reply's word answers the word last taken.
        answers: What the requests are answered with.
        texts_XB: What ``refusal_texts`` gave.
        arrivals_R: A counter for each request, ``(R,)`` int32, 0 before and after.
        started: When the batch's experts began, us, ``(1,)`` int64.
        now: When they had ended; None: now, by the device's clock.
        version: The newest placement that the host knows, ``(1,)`` int64.
        rows_per_token: 1, or K in ``exact`` mode.
        blocks: Thread blocks that share one request's rows.

    Example:
        Of 6 rows, requests of 2 and 1 tokens are answered with rows 0 and 1, and with row 3.
    """
    check_tensor("texts_XB", texts_XB, (torch.uint8,), 2)
    check_tensor("arrivals_R", arrivals_R, (torch.int32,), 1)
    check_at_least("rows_per_token", rows_per_token, 1)
    check_at_least("blocks", blocks, 1)
    _op(
        tables.pairs_PC,
        tables.book_3PS,
        answers.ready_R,
        answers.statuses_R,
        answers.num_tokens_R,
        answers.rows_ND,
        texts_XB,
        arrivals_R,
        started,
        now,
        version,
        rows_per_token,
        blocks,
    )


def launch(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    ready_R: Tensor,
    statuses_R: Tensor,
    num_tokens_R: Tensor,
    rows_ND: Tensor,
    texts_XB: Tensor,
    arrivals_R: Tensor,
    started: Tensor,
    now: Tensor | None,
    version: Tensor,
    rows_per_token: int,
    blocks: int,
) -> None:
    """Run the kernel: ``blocks`` programs a request."""
    rows_NU = units_of(rows_ND)
    with on_device(pairs_PC):
        _write_kernel[(len(ready_R), blocks)](
            pairs_PC,
            book_3PS,
            ready_R,
            statuses_R,
            num_tokens_R,
            rows_NU,
            texts_XB,
            arrivals_R,
            started,
            started if now is None else now,
            version,
            *book_3PS.shape[1:],
            len(rows_ND) // len(ready_R),
            ROWS_A_TOKEN=rows_per_token,
            BY_TIMER=now is None and isinstance(_write_kernel, triton.JITFunction),
            UNITS=rows_NU.shape[1],
            UNIT_BYTES=rows_NU.element_size(),
            ALIGNED=alignment_of(rows_NU),
            BLOCK=_BLOCK,
            num_warps=8,
        )


@triton.jit
def _write_head(
    pairs_PC: tl.tensor,
    pair: tl.tensor,
    slot_at: tl.tensor,
    word: tl.tensor,
    status: tl.tensor,
    size: tl.tensor,
    texts_XB: tl.tensor,
    since_us: tl.tensor,
    started_us: tl.tensor,
    ended_us: tl.tensor,
    version: tl.tensor,
) -> None:
    """Write one reply's header, and the text of an error."""
    queue_us = tl.maximum(started_us - since_us, 0)
    experts_us = ended_us - started_us
    if status != _OK:
        byte = tl.arange(0, _TEXT_BYTES)
        text = tl.load(texts_XB + status * _TEXT_BYTES + byte)
        size = tl.sum((text != 0).to(tl.int32), axis=0)
        to = (slot_at + BEHIND_HEADER).to(tl.pointer_type(tl.uint8))
        tl.store(to + byte, text, mask=byte < size)
        queue_us = tl.zeros_like(queue_us)
        experts_us = tl.zeros_like(experts_us)
    store_8(slot_at + REPLY_INSTANCE, of_pair(pairs_PC, pair, INSTANCE))
    store_8(slot_at + REPLY_EPOCH, of_pair(pairs_PC, pair, EPOCH))
    store_8(slot_at + REPLY_SEQUENCE, sequence_of(word))
    store_8(slot_at + REPLY_VERSION, version)
    store_4(slot_at + REPLY_STATUS, status)
    store_4(slot_at + REPLY_SIZE, size)
    store_4(slot_at + REPLY_QUEUE, tl.minimum(queue_us, _LONGEST_TIME))
    store_4(slot_at + REPLY_EXPERTS, tl.minimum(experts_us, _LONGEST_TIME))


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "places"])
def _write_kernel(
    pairs_PC: tl.tensor,
    book_3PS: tl.tensor,
    ready_R: tl.tensor,
    statuses_R: tl.tensor,
    num_tokens_R: tl.tensor,
    rows_NU: tl.tensor,
    texts_XB: tl.tensor,
    arrivals_R: tl.tensor,
    started: tl.tensor,
    now: tl.tensor,
    version: tl.tensor,
    num_pairs: tl.tensor,
    num_slots: tl.tensor,
    places: tl.tensor,
    ROWS_A_TOKEN: tl.constexpr,
    BY_TIMER: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy every ``blocks``-th row of one answer; the last block to arrive sets the word."""
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    status = tl.load(statuses_R + request)
    if status >= _OK:
        entry = tl.load(ready_R + request)
        pair = (entry // num_slots).to(tl.int64)
        slot = (entry % num_slots).to(tl.int64)
        since_PS = book_3PS + num_pairs * num_slots + entry
        word = tl.load(since_PS + num_pairs * num_slots)
        slot_at = reply_slot_at(pairs_PC, pair, slot)
        if status == _OK:
            num_rows = tl.load(num_tokens_R + request).to(tl.int64) * ROWS_A_TOKEN
            first = request * places
            for row in range(block, num_rows, tl.num_programs(1)):
                to = slot_at + BEHIND_HEADER + row * (UNITS * UNIT_BYTES)
                copy_units(rows_NU + (first + row) * UNITS, to, UNITS, ALIGNED, BLOCK)
        if block == 0:
            _write_head(
                pairs_PC,
                pair,
                slot_at,
                word,
                tl.load(statuses_R + request),
                tl.load(num_tokens_R + request),
                texts_XB,
                tl.load(since_PS),
                tl.load(started),
                clock_ns(BY_TIMER) // 1000 if BY_TIMER else tl.load(now),
                tl.load(version),
            )
        if arrive(arrivals_R + request):
            store_word(word_at(pairs_PC, pair, slot, REPLIES), response_word(word))


_op = define_op(
    "write_replies(Tensor pairs_PC, Tensor book_3PS, Tensor ready_R, Tensor statuses_R, "
    "Tensor num_tokens_R, Tensor rows_ND, Tensor texts_XB, Tensor(a!) arrivals_R, "
    "Tensor started, Tensor? now, Tensor version, int rows_per_token, int blocks) -> ()",
    kernel=launch,
    twin=write_replies_ref,
    fake=lambda *_: None,
)
