"""What the writing ops leave in a window: every part, whatever the row's size, and nothing else."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
import torch

from tests.ops.windowed import Pair, client_of, numbers, server_of
from torch_eaas.errors import ConfigError
from torch_eaas.ops.pair_table import FREE_ROW, ClientTables, Column, pair_row, signed, unsigned
from torch_eaas.ops.write_replies import Answers, refusal_texts, write_replies
from torch_eaas.ops.write_requests import Shares, write_requests
from torch_eaas.protocol.layout import HEADER_BYTES, REPLY_HEADER, PairSpec, Status
from torch_eaas.row_views import TORCH_DTYPES

pytestmark = pytest.mark.usefixtures("implementation", "poisoned_empty")

int32 = torch.int32


def shares_of(spec: PairSpec, counts: list[int]) -> Shares:
    """Return shares in which pair p gets tokens p, p + 1, ... and every id is 1."""
    pairs = len(counts)
    return Shares(
        numbers(*counts, dtype=int32),
        torch.arange(pairs, dtype=int32)[:, None] + torch.arange(spec.max_tokens, dtype=int32),
        torch.ones((pairs, spec.max_tokens, spec.top_k), dtype=int32),
        torch.full((pairs, spec.max_tokens, spec.top_k), 0.5),
    )


def write(
    tables: ClientTables,
    shares: Shares,
    x_ND: torch.Tensor,
    scales_Nd: torch.Tensor | None = None,
    *,
    gate: int = 0,
    blocks: int = 2,
) -> None:
    arrivals_P = torch.zeros_like(shares.counts_P)
    write_requests(
        tables,
        shares,
        x_ND,
        numbers(gate),
        arrivals_P,
        layer=1,
        version=numbers(4),
        budget_us=500,
        blocks=blocks,
        scales_Nd=scales_Nd,
    )
    assert not arrivals_P.any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("hidden", [1, 62, 63, 64, 2500])
@pytest.mark.parametrize("blocks", [1, 3])
def test_rows_of_any_size_arrive_bit_by_bit(dtype: str, hidden: int, blocks: int) -> None:
    wire: Any = dtype
    spec = PairSpec(hidden_size=hidden, top_k=1, slots=1, max_tokens=4, wire_dtype=wire)
    pair = Pair(spec=spec)
    made = torch.Generator().manual_seed(hidden)
    # any bits, those of NaN too
    x_ND = torch.randint(-(2**15), 2**15, (5, hidden, 2), generator=made, dtype=torch.int16)
    x_ND = x_ND.view(TORCH_DTYPES[dtype]).flatten(1)[:, :hidden].contiguous()
    scales_Nd = torch.randn(5, -(-hidden // 128), generator=made) if dtype == "fp8" else None
    tables = ClientTables.empty(1, 1)
    tables.pairs_PC[0] = pair.row
    shares = shares_of(spec, [4])
    shares.tokens_PT[0] = numbers(4, 0, 0, 2, dtype=int32)
    write(tables, shares, x_ND, scales_Nd, blocks=blocks)
    if scales_Nd is not None:
        at = spec.request_slot(0) + spec.scales_offset
        expected = scales_Nd[[4, 0, 0, 2]].numpy().tobytes()
        assert bytes(pair.requests[at : at + len(expected)]) == expected
        # up to the hidden states nothing else
        assert not any(
            pair.requests[at + len(expected) : spec.request_slot(0) + spec.hidden_offset]
        )
    at = spec.request_slot(0) + spec.hidden_offset
    expected = x_ND.view(torch.uint8)[[4, 0, 0, 2]].numpy().tobytes()
    assert bytes(pair.requests[at : at + len(expected)]) == expected
    assert not any(pair.requests[at + len(expected) :])
    assert bytes(pair.requests[:8]) == struct.pack("<Q", 0x101)


def test_pairs_without_tokens_and_free_rows_are_left_alone() -> None:
    pairs = [Pair(), None, Pair()]
    tables = client_of(pairs, [1, 0, 2])
    spec = Pair().spec
    write(tables, shares_of(spec, [0, 0, 2]), torch.ones(9, spec.hidden_size))
    assert pairs[0] is not None
    assert not any(pairs[0].requests)
    assert tables.words_PS.tolist() == [[0] * 4, [0] * 4, [0, 0, 0x101, 0]]


def test_behind_a_closed_gate_nothing_is_written_and_no_sequence_advances() -> None:
    pair = Pair()
    tables = client_of([pair], [0])
    write(tables, shares_of(pair.spec, [2]), torch.ones(9, 6), gate=1)
    assert not any(pair.requests)
    assert not tables.words_PS.any()


def test_a_batch_in_another_dtype_or_layout_is_refused() -> None:
    pair = Pair()
    tables, shares = client_of([pair], [0]), shares_of(pair.spec, [1])
    dtypes = "float32 or bfloat16 or float16 or float8_e4m3fn"
    with pytest.raises(ConfigError, match=f"x_ND must be {dtypes}, got .*64"):
        write(tables, shares, torch.ones(3, 6, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"x_ND must be contiguous, got strides \(1, 3\)"):
        write(tables, shares, torch.ones(6, 3).T)


def test_scales_belong_to_fp8_and_to_no_other_wire_dtype() -> None:
    pair = Pair()
    tables, shares = client_of([pair], [0]), shares_of(pair.spec, [1])
    x_ND, scales_Nd = torch.ones(3, 6), torch.ones(3, 1)
    message = "scales_Nd belongs to rows of float8_e4m3fn and to no others, got {} for torch.{}; "
    with pytest.raises(ConfigError, match=message.format("some", "float32")):
        write(tables, shares, x_ND, scales_Nd)
    x_ND = x_ND.to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=message.format("none", "float8_e4m3fn")):
        write(tables, shares, x_ND)
    with pytest.raises(ConfigError, match=r"scales_Nd must have shape \(3, 1\) beside .*\(3, 2\)"):
        write(tables, shares, x_ND, torch.ones(3, 2))
    with pytest.raises(ConfigError, match=r"scales_Nd must be float32, got torch.float64"):
        write(tables, shares, x_ND, scales_Nd.double())


def test_shares_in_another_dtype_are_refused() -> None:
    shares = shares_of(Pair().spec, [1])
    with pytest.raises(ConfigError, match=r"ids_PTK must be int32, got torch.int64; cast it first"):
        Shares(shares.counts_P, shares.tokens_PT, shares.ids_PTK.long(), shares.weights_PTK)


def answer(pair: Pair, statuses: list[int], rows_ND: torch.Tensor, **options: int) -> None:
    """Answer requests of 2 tokens in the pair's first slots, each of rows of its own."""
    tables = server_of([pair])
    tables.book_3PS[1] = 100
    tables.book_3PS[2] = signed((1 << 64) - 255)
    count = len(statuses)
    entries = torch.arange(count, dtype=int32)
    per_token = options.pop("rows_per_token", 1)
    tokens_R = torch.full((count,), 2, dtype=int32)
    arrivals_R = torch.zeros(count, dtype=int32)
    write_replies(
        tables,
        Answers(entries, numbers(*statuses, dtype=int32), tokens_R, rows_ND),
        refusal_texts(),
        arrivals_R,
        started=numbers(options.get("started", 130)),
        now=numbers(options.get("now", 200)),
        version=numbers(6),
        rows_per_token=per_token,
        blocks=3,
    )
    assert not arrivals_R.any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("hidden", [1, 63, 2500])
@pytest.mark.parametrize("per_token", [1, 2])
def test_each_answer_gets_its_own_rows(dtype: str, hidden: int, per_token: int) -> None:
    options: Any = {"reply_dtype": dtype, "combine": "partial" if per_token == 1 else "exact"}
    spec = PairSpec(hidden_size=hidden, top_k=2, slots=2, max_tokens=3, **options)
    pair = Pair(spec=spec)
    rows_ND = torch.arange(4.0 * per_token)[:, None] + torch.rand(hidden)
    rows_ND = rows_ND.to(torch.float32 if dtype == "fp32" else torch.bfloat16)
    answer(pair, [Status.OK, Status.OK], rows_ND, rows_per_token=per_token)
    for slot, rows in enumerate(rows_ND.split(2 * per_token)):
        at = spec.reply_slot(slot) + HEADER_BYTES
        expected = rows.contiguous().view(torch.uint8).numpy().tobytes()
        assert bytes(pair.replies[at : at + len(expected)]) == expected
        # the sequence of the word taken, 2**56 - 1, and not a number of any header
        header = (7, 1, (1 << 56) - 1, 6, Status.OK, 2, 30, 70)
        assert REPLY_HEADER.unpack_from(pair.replies, spec.reply_slot(slot)) == header
        word = pair.replies[8 * slot : 8 * slot + 8]
        assert int.from_bytes(word, "little") == (1 << 64) - 254


@pytest.mark.parametrize("status", [status for status in Status if status != Status.OK])
def test_an_error_says_what_it_is_and_writes_no_rows(status: Status) -> None:
    pair = Pair()
    answer(pair, [status, -1], torch.full((4, 6), 3.0))
    at = pair.spec.reply_slot(0)
    *_, code, size, queue_us, experts_us = REPLY_HEADER.unpack_from(pair.replies, at)
    assert (code, queue_us, experts_us) == (status, 0, 0)
    text = bytes(pair.replies[at + HEADER_BYTES : at + HEADER_BYTES + size]).decode()
    assert len(text) > 10
    assert not any(pair.replies[at + HEADER_BYTES + size :])
    # a request that is none gets no word
    assert int.from_bytes(pair.replies[8:16], "little") == 0


def test_times_that_a_field_cannot_hold_stop_at_its_largest() -> None:
    pair = Pair()
    answer(pair, [Status.OK], torch.zeros(2, 6), started=2**40, now=2**41)
    times = REPLY_HEADER.unpack_from(pair.replies, pair.spec.reply_slot(0))[6:]
    assert times == (2**32 - 1, 2**32 - 1)


def test_every_status_has_a_text_that_fits_the_smallest_slot() -> None:
    texts_XB = refusal_texts()
    assert texts_XB.shape == (len(Status), 128)
    texts = [bytes(row.tolist()).rstrip(b"\0") for row in texts_XB]
    assert [bool(text) for text in texts] == [status != Status.OK for status in Status]
    assert all(text.isascii() for text in texts)


def test_a_pairs_row_says_where_its_windows_parts_lie() -> None:
    spec = PairSpec(hidden_size=8, top_k=2, slots=17, max_tokens=33)
    row = pair_row(spec, requests=0x1000, replies=0x2000, instance=2**64 - 1, epoch=3)
    assert len(row) == len(FREE_ROW) == len(Column)
    assert row[Column.REQUESTS : Column.SLOTS] == [0x1000, 0x2000, -1, 3]
    # 17 words of 8 bytes, 33 x 2 ids of 4 bytes, 33 x 8 numbers of 4, each rounded up to 128
    assert row[Column.SLOTS :] == [17, 33, 256, 128 + 384 + 384 + 1152, 128 + 1152, 512, 896, 896]
    assert unsigned(row[Column.INSTANCE]) == 2**64 - 1
    fp8 = dataclasses.replace(spec, wire_dtype="fp8")
    row = pair_row(fp8, requests=0x1000, replies=0x2000, instance=1, epoch=1)
    # one scale a token: 33 of 4 bytes, rounded up to 256
    assert (row[Column.SCALES_OFFSET], row[Column.HIDDEN_OFFSET]) == (896, 896 + 256)


@pytest.mark.parametrize("address", [0, -128, 0x1008])
def test_a_window_at_an_address_that_is_not_aligned_is_refused(address: int) -> None:
    message = f"requests must be an address that is a multiple of 128, got {address:#x}"
    with pytest.raises(ConfigError, match=message):
        pair_row(Pair().spec, requests=address, replies=0x1000, instance=1, epoch=1)
