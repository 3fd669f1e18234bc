"""What is staged and put lies in the peer's window as if it had been written there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.test_write_windows import answer, shares_of, write
from tests.ops.windowed import SPEC, Pair, numbers
from torch_eaas.errors import ConfigError
from torch_eaas.ops.pair_table import ClientTables, Column, ServerTables
from torch_eaas.ops.put_slots import put_replies, put_requests
from torch_eaas.ops.put_table import NO_PUT, PutColumn, reply_put_row, request_put_row
from torch_eaas.protocol.layout import HEADER_BYTES, PairSpec, Status

int32 = torch.int32
DIRTY = 0xAB
"""What lies in a staged slot behind what a request uses: it must not travel."""

with_both = pytest.mark.usefixtures("implementation", "poisoned_empty")


def dirty(pair: Pair, window: Column) -> None:
    """Fill a pair's slots, but not its words, with what an earlier request might have left."""
    view = pair.requests if window is Column.REQUESTS else pair.replies
    words = pair.spec.words_bytes
    view[words:] = bytes([DIRTY]) * (len(view) - words)


def used_only(view: memoryview, spec: PairSpec, used: dict[int, int]) -> bytes:
    """Return a window's bytes with 0 for all but its words and what some slots use.

    Args:
        view: The window.
        spec: What was agreed.
        used: The number of bytes from each slot's offset.
    """
    kept = bytearray(len(view))
    for at, size in {0: spec.words_bytes, **used}.items():
        kept[at : at + size] = view[at : at + size]
    return bytes(kept)


def window_of(pair: Pair, column: Column) -> int:
    return int(pair.row[column])


def client(pairs: list[Pair], slots: list[int]) -> ClientTables:
    tables = ClientTables.empty(len(pairs), pairs[0].spec.slots)
    for p, pair in enumerate(pairs):
        tables.pairs_PC[p] = pair.row
        tables.slots_P[p] = slots[p]
    return tables


def request_puts(spec: PairSpec, peers: list[Pair | None]) -> torch.Tensor:
    """Return the table of puts into some peers' windows; None for one that stores reach."""
    rows = [
        request_put_row(spec, window=window_of(peer, Column.REQUESTS), pe=3) if peer else NO_PUT
        for peer in peers
    ]
    return torch.tensor(rows)


@with_both
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("hidden", [1, 63, 640])
@pytest.mark.parametrize("counts", [[1, 4], [0, 3]], ids=str)
def test_a_put_request_is_the_one_that_stores_would_have_written(
    dtype: Any, hidden: int, counts: list[int]
) -> None:
    spec = PairSpec(hidden_size=hidden, top_k=2, slots=3, max_tokens=4, wire_dtype=dtype)
    x_ND = torch.randn(9, hidden).to(torch.float32 if dtype == "fp32" else torch.bfloat16)
    shares, slots = shares_of(spec, counts), [2, 1]
    stored, staged, peers = ([Pair(spec=spec) for _ in counts] for _ in range(3))
    for pair in (*stored, *staged):
        dirty(pair, Column.REQUESTS)
    write(client(stored, slots), shares, x_ND)
    tables = client(staged, slots)
    write(tables, shares, x_ND)
    put_requests(tables, request_puts(spec, [*peers]), shares.counts_P, numbers(0), bitcode="")
    for i, (expected, peer) in enumerate(zip(stored, peers, strict=True)):
        size = spec.hidden_offset + counts[i] * hidden * x_ND.element_size() if counts[i] else 0
        used = {spec.request_slot(slots[i]): size}
        # one piece, gaps between its parts included, and not one byte more
        assert bytes(peer.requests) == used_only(expected.requests, spec, used)


@with_both
def test_a_pair_that_stores_reach_is_skipped() -> None:
    pairs, peer = [Pair(), Pair()], Pair()
    tables, shares = client(pairs, [0, 0]), shares_of(SPEC, [1, 1])
    write(tables, shares, torch.ones(9, SPEC.hidden_size))
    before = bytes(pairs[0].requests)
    put_requests(tables, request_puts(SPEC, [None, peer]), shares.counts_P, numbers(0), bitcode="")
    assert bytes(pairs[0].requests) == before
    assert peer.requests[:8] == pairs[1].requests[:8] == bytes([1, 1, 0, 0, 0, 0, 0, 0])


@with_both
def test_behind_a_closed_gate_nothing_is_put() -> None:
    staged, peer = Pair(), Pair()
    tables, shares = client([staged], [1]), shares_of(SPEC, [2])
    write(tables, shares, torch.ones(9, SPEC.hidden_size))
    put_requests(tables, request_puts(SPEC, [peer]), shares.counts_P, numbers(1), bitcode="")
    assert not any(peer.requests)


def put_answers(
    staged: Pair, peer: Pair, statuses: list[int], entries: list[int], gate: int = 0
) -> None:
    tables = ServerTables.empty(1, staged.spec.slots)
    tables.pairs_PC[0] = staged.row
    row = reply_put_row(staged.spec, window=window_of(peer, Column.REPLIES), pe=0)
    given = (numbers(*statuses, dtype=int32), numbers(*entries, dtype=int32))
    put_replies(tables, torch.tensor([row]), *given, numbers(gate), bitcode="")


@with_both
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("per_token", [1, 2])
@pytest.mark.parametrize("hidden", [1, 63, 640])
def test_a_put_reply_is_the_one_that_stores_would_have_written(
    dtype: Any, per_token: int, hidden: int
) -> None:
    combine: Any = "partial" if per_token == 1 else "exact"
    spec = PairSpec(
        hidden_size=hidden, top_k=2, slots=4, max_tokens=3, reply_dtype=dtype, combine=combine
    )
    stored, staged, peer = (Pair(spec=spec) for _ in range(3))
    rows_ND = torch.randn(8 * per_token, hidden)
    rows_ND = rows_ND.to(torch.float32 if dtype == "fp32" else torch.bfloat16)
    # an answer, a request that is none, an answer, and an error's text
    statuses = [Status.OK, -1, Status.OK, Status.UNKNOWN_EXPERT]
    for pair in (stored, staged):
        dirty(pair, Column.REPLIES)
        answer(pair, statuses, rows_ND, rows_per_token=per_token)
    put_answers(staged, peer, statuses, [0, -1, 2, 3])
    answered = HEADER_BYTES + 2 * per_token * hidden * rows_ND.element_size()
    text = HEADER_BYTES + len("an expert of this layer is not held here")
    slots = [spec.reply_slot(slot) for slot in range(4)]
    used = {slots[0]: answered, slots[2]: answered, slots[3]: text}
    assert bytes(peer.replies) == used_only(stored.replies, spec, used)
    assert int.from_bytes(peer.replies[:8], "little") & 0xFF == 2


@with_both
def test_an_answer_that_was_not_written_now_is_not_put_again() -> None:
    staged, peer = Pair(), Pair()
    answer(staged, [Status.OK], torch.ones(2, SPEC.hidden_size))
    # a slot that is ready, but was not taken this time
    put_answers(staged, peer, [-1], [0])
    assert not any(peer.replies)
    put_answers(staged, peer, [Status.OK], [0], gate=1)
    assert not any(peer.replies)


def test_a_row_of_puts_says_where_the_window_lies_whose_it_is_and_what_a_token_takes() -> None:
    spec = PairSpec(hidden_size=7, top_k=3, slots=1, max_tokens=2, wire_dtype="bf16")
    assert request_put_row(spec, window=0x1000, pe=5) == [0x1000, 5, 14]
    assert reply_put_row(spec, window=0x1000, pe=5) == [0x1000, 5, 28]
    exact = PairSpec(hidden_size=7, top_k=3, slots=1, max_tokens=2, combine="exact")
    assert reply_put_row(exact, window=0x80, pe=0) == [0x80, 0, 84]
    assert len(NO_PUT) == len(PutColumn)


@pytest.mark.parametrize("window", [0, -128, 0x1008])
def test_a_window_that_is_not_aligned_is_refused(window: int) -> None:
    match = f"window must be an address that is a multiple of 128, got {window:#x}"
    with pytest.raises(ConfigError, match=match):
        request_put_row(SPEC, window=window, pe=0)


def test_a_negative_pe_is_refused() -> None:
    with pytest.raises(ConfigError, match="pe must be an integer of at least 0, got -1"):
        reply_put_row(SPEC, window=0x1000, pe=-1)


@with_both
def test_tables_of_another_dtype_are_refused() -> None:
    tables = client([Pair()], [0])
    given = (numbers(1, dtype=int32), numbers(0))
    with pytest.raises(
        ConfigError, match=r"puts_PQ must be int64, got torch\.int32; cast it first"
    ):
        put_requests(tables, torch.zeros(1, 3, dtype=int32), *given, bitcode="")


def test_the_ops_keep_torchs_rules() -> None:
    staged, peer = Pair(), Pair()
    staged.request(1, 0x101, num_tokens=2)
    staged.reply(1, 0x102, status=Status.INTERNAL, size=5)
    gate, one = numbers(0), numbers(1, dtype=int32)
    pairs_PC, puts_PQ = staged.row[None], request_puts(SPEC, [peer])
    requests = (pairs_PC, puts_PQ, one, numbers(1), gate, "")
    replies = (pairs_PC, puts_PQ, one, one, gate, SPEC.slots, "")
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.torch_eaas
    torch.library.opcheck(ops.put_requests.default, requests, test_utils=checks)
    torch.library.opcheck(ops.put_replies.default, replies, test_utils=checks)
