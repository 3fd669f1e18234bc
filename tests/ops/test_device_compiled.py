"""The device path's kernels as they compile: the order that the protocol needs is in the PTX."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.ops.compiling import CAPABILITIES, Compiled, compiled
from torch_eaas.ops import (
    add_replies,
    answer_counts,
    casting,
    choose_replicas,
    clock,
    read_hidden,
    read_requests,
    read_text,
    share_tokens,
    signal,
    slot_scan,
    write_replies,
    write_requests,
)
from torch_eaas.ops.pair_table import ClientTables, ServerTables
from torch_eaas.ops.reference_client import Outcome
from torch_eaas.ops.write_replies import refusal_texts
from torch_eaas.protocol.layout import REPLY_FIELDS, REQUEST_FIELDS

P, S, R, T, K, D = 32, 4, 16, 128, 8, 7168
FP8 = torch.float8_e4m3fn


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def launch_wait(*, for_free: bool) -> object:
    t = ClientTables.empty(P, S)
    counts_P = zeros(P, dtype=torch.int32)
    return signal.launch(
        *(t.pairs_PC, t.slots_P, t.words_PS, counts_P, zeros(1)),
        *(zeros(P, dtype=torch.int32), zeros(1)),
        *(zeros(P, len(Outcome)), 3, 20_000, 10**9, for_free),
    )


def launch_add(ids_TK: torch.Tensor, *, is_bf16: bool) -> object:
    t, places_PT = ClientTables.empty(P, S), zeros(P, T, dtype=torch.int32)
    exact = (ids_TK, zeros(256, dtype=torch.int32)) if ids_TK.numel() else (None, None)
    add_TD = zeros(T, D, dtype=torch.bfloat16)
    return add_replies.launch(t.pairs_PC, t.slots_P, places_PT, zeros(1), add_TD, *exact, is_bf16)


def launch_scan() -> object:
    t = ServerTables.empty(P, S)
    books = (t.pairs_PC, t.book_3PS, t.scanned_P, t.turn)
    return slot_scan.launch(*books, zeros(1), R, 256, 50, 10**9)


def launch_read() -> object:
    t = ServerTables.empty(P, S)
    draining, groups_LE = zeros(1, dtype=torch.int32), zeros(61, 256, dtype=torch.int32)
    tokens_R = zeros(R, dtype=torch.int32)
    lists = (zeros(R, dtype=torch.int32), zeros(1), draining, groups_LE)
    return read_requests.launch(t.pairs_PC, t.book_3PS, *lists, T, K, tokens_R)


def launch_write_requests(dtype: torch.dtype, hidden: int = D, layer: int = 3) -> object:
    t = ClientTables.empty(P, S)
    counts_P, tokens_PT = zeros(P, dtype=torch.int32), zeros(P, T, dtype=torch.int32)
    ids_PTK = zeros(P, T, K, dtype=torch.int32)
    weights_PTK = zeros(P, T, K, dtype=torch.float32)
    shares = (counts_P, tokens_PT, ids_PTK, weights_PTK)
    x_ND = zeros(T, hidden, dtype=dtype)
    scales_Nd = scales_of(x_ND)
    arrivals_P = zeros(P, dtype=torch.int32)
    tables = (t.pairs_PC, t.slots_P, t.words_PS)
    return write_requests.launch(
        *tables, *shares, x_ND, scales_Nd, zeros(1), arrivals_P, zeros(1), layer, 20_000, 4
    )


def launch_read_hidden(dtype: torch.dtype, hidden: int = D) -> object:
    t, x_RTD = ServerTables.empty(P, S), zeros(R, T, hidden, dtype=dtype)
    ready_R, num_tokens_R = zeros(R, dtype=torch.int32), zeros(R, dtype=torch.int32)
    return read_hidden.launch(
        t.pairs_PC, t.book_3PS, ready_R, num_tokens_R, x_RTD, scales_of(x_RTD), 4
    )


def scales_of(rows: torch.Tensor) -> torch.Tensor | None:
    """Return room for the scales of rows, if they are fp8."""
    if rows.dtype != FP8:
        return None
    return zeros(*rows.shape[:-1], -(-rows.shape[-1] // 128), dtype=torch.float32)


def launch_write_replies(dtype: torch.dtype, rows_per_token: int) -> object:
    t = ServerTables.empty(P, S)
    rows_ND, statuses_R = zeros(R * T, D, dtype=dtype), zeros(R, dtype=torch.int32)
    ready_R = zeros(R, dtype=torch.int32)
    answers = (ready_R, statuses_R, zeros(R, dtype=torch.int32), rows_ND)
    # the device's own clock, as a server's iteration has it
    times = (zeros(1), None, zeros(1))
    arrivals_R = zeros(R, dtype=torch.int32)
    return write_replies.launch(
        t.pairs_PC, t.book_3PS, *answers, refusal_texts(), arrivals_R, *times, rows_per_token, 4
    )


LAUNCHES: dict[str, Callable[[], object]] = {
    "choose replicas": lambda: choose_replicas.launch(
        zeros(T, K, dtype=torch.int32), zeros(256, 2, dtype=torch.int32), P
    ),
    "share tokens": lambda: share_tokens.launch(
        zeros(T, K, dtype=torch.int32),
        zeros(T, K, dtype=torch.float32),
        zeros(256, dtype=torch.int32),
        zeros(1),
        P,
        3,
    ),
    "add replies": lambda: launch_add(zeros(T, K, dtype=torch.int32)[:, :0], is_bf16=False),
    "add replies bf16, exact": lambda: launch_add(zeros(T, K, dtype=torch.int32), is_bf16=True),
    "wait for replies": lambda: launch_wait(for_free=False),
    "wait for free slots": lambda: launch_wait(for_free=True),
    "read a text": lambda: read_text.launch(
        ClientTables.empty(P, S).pairs_PC, ClientTables.empty(P, S).slots_P, 2, 60
    ),
    "read the clock": lambda: clock.launch(zeros(1)),
    "scan": launch_scan,
    "count answers": lambda: answer_counts.launch(
        zeros(answer_counts.NUM_COUNTERS),
        zeros(R, dtype=torch.int32),
        zeros(R, dtype=torch.int32),
        zeros(1),
        zeros(1),
    ),
    "cast rows": lambda: casting.launch(
        zeros(R * T, D, dtype=torch.float32), torch.bfloat16, zeros(R, dtype=torch.int32)
    ),
    "read requests": launch_read,
    "read hidden": lambda: launch_read_hidden(torch.bfloat16),
    "read hidden in fp8": lambda: launch_read_hidden(FP8),
    # one kernel for all layers: none is compiled while another one spins
    "write requests": lambda: [
        launch_write_requests(torch.bfloat16, layer=layer) for layer in (0, 1, 3, 16)
    ],
    # an odd row is copied in halves
    "write requests of 63 numbers": lambda: launch_write_requests(torch.bfloat16, 63),
    "write requests in fp8": lambda: launch_write_requests(FP8),
    "write requests in fp8 of 63 numbers": lambda: launch_write_requests(FP8, 63),
    "write replies": lambda: launch_write_replies(torch.float32, 1),
}

ACQUIRE = r"ld\.global\.sys\.acquire\.b64"
RELEASE = r"atom\.global\.sys\.release\.exch\.b64"
ARRIVAL = r"atom\.global\.gpu\.acq_rel\.add\.u32"
BARRIER = r"\bbar\.sync"
VOLATILE = r"ld\.volatile\.global"

ON_EACH = pytest.mark.parametrize("capability", CAPABILITIES)


def kernel_of(launch: str, capability: int) -> Compiled:
    [kernel] = [c for c in compiled(__name__) if (c.launch, c.capability) == (launch, capability)]
    return kernel


def places(kernel: Compiled, pattern: str) -> list[int]:
    """Return where a regular expression stands in the PTX."""
    return [match.start() for match in re.finditer(pattern, kernel.ptx)]


@ON_EACH
@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_kernel_compiles_and_spills_nothing(launch: str, capability: int) -> None:
    kernel = kernel_of(launch, capability)
    assert f".target sm_{capability}" in kernel.ptx
    assert kernel.local_bytes == 0
    assert kernel.count(r"\b(ld|st)\.local") == 0
    # what the async proxy stores into a window would not be ordered before the word
    assert kernel.count(r"cp\.async\.bulk|st\.async|st\.bulk|cp\.reduce") == 0


@ON_EACH
@pytest.mark.parametrize("launch", ["wait for replies", "wait for free slots"])
def test_a_wait_polls_with_a_plain_load_that_acquires_at_system_scope(
    launch: str, capability: int
) -> None:
    kernel = kernel_of(launch, capability)
    [poll] = places(kernel, ACQUIRE)
    # the abort word is this GPU's own; no read-modify-write touches a peer's word
    abort, closing = places(kernel, r"ld\.global\.gpu\.acquire\.b64")
    give_up, arrival = places(kernel, r"\batom\.")
    assert kernel.count(r"atom\.global\.release\.gpu\.cas\.b64") == 1
    # the last block to arrive sees the abort word as all of them left it
    assert places(kernel, ARRIVAL) == [arrival]
    assert arrival < closing
    # once for the start, once a look
    start, look = places(kernel, "%globaltimer")
    assert start < poll < abort < look < give_up
    # one thread acquires: a barrier hands it on to the others before they go on
    assert any(poll < barrier < abort for barrier in places(kernel, BARRIER))


@ON_EACH
def test_a_reply_is_read_after_its_word_was_acquired(capability: int) -> None:
    kernel = kernel_of("wait for replies", capability)
    [poll] = places(kernel, ACQUIRE)
    fields = places(kernel, VOLATILE)
    assert len(fields) == len(REPLY_FIELDS)
    assert poll < min(fields)


@ON_EACH
def test_a_request_is_read_after_its_word_was_acquired_and_each_field_once(capability: int) -> None:
    kernel = kernel_of("read requests", capability)
    [word] = places(kernel, ACQUIRE)
    fields = places(kernel, VOLATILE)
    assert word < min(fields)
    assert any(word < barrier < min(fields) for barrier in places(kernel, BARRIER))
    # what is checked is the copy: all threads load what one of them stored
    header = fields[: len(REQUEST_FIELDS)]
    assert any(header[-1] < barrier < fields[len(header)] for barrier in places(kernel, BARRIER))
    # behind the header come the ids: 1024 of them, by the 128 threads of a block
    assert len(fields) == len(REQUEST_FIELDS) + 1024 // 128
    assert kernel.count(r"\batom\.") == 0


@ON_EACH
def test_a_scan_only_loads_what_clients_write_and_its_threads_agree_when_to_go_on(
    capability: int,
) -> None:
    kernel = kernel_of("scan", capability)
    assert kernel.count(r"\batom\.") == 0
    # each look, all words once more, and the headers' counts
    look, words, counts = places(kernel, VOLATILE)
    # once for the start, once a look, once for the end
    start, time, end = places(kernel, "%globaltimer")
    assert start < look < time < words < counts < end
    # one thread stores whether to look again, and all load it behind a barrier
    [decision] = [at for at in places(kernel, r"\bst\.global\.b32") if time < at < words]
    [agreed] = [at for at in places(kernel, r"\bld\.global\.b32") if decision < at < words]
    barriers = places(kernel, BARRIER)
    assert any(decision < barrier < agreed for barrier in barriers)
    assert any(agreed < barrier < words for barrier in barriers)
    # what was seen, since when, and a new time: a pair's last one is loaded by several warps before
    *_, since, scanned = [at for at in places(kernel, r"\bst\.global\.b64") if words < at < counts]
    assert any(since < barrier < scanned for barrier in barriers)


@ON_EACH
@pytest.mark.parametrize("launch", [name for name in LAUNCHES if name.startswith("write")])
def test_a_word_is_released_by_the_last_block_to_arrive(launch: str, capability: int) -> None:
    kernel = kernel_of(launch, capability)
    [arrival] = places(kernel, ARRIVAL)
    [release] = places(kernel, RELEASE)
    assert kernel.count(r"\batom\.") == 2
    barriers = places(kernel, BARRIER)
    assert arrival < release
    # all threads' stores come before the one thread's arrival, and before its release
    last_store = max(store for store in places(kernel, r"\bst\.global") if store < arrival)
    assert any(last_store < barrier < arrival for barrier in barriers)
    assert any(arrival < barrier < release for barrier in barriers)


@ON_EACH
def test_payloads_are_copied_by_sixteen_bytes_where_rows_allow_it(capability: int) -> None:
    for launch in ("write requests", "write requests in fp8", "write replies"):
        assert kernel_of(launch, capability).count(r"st\.global\.v4\.b32") > 0, launch
    for launch in ("read hidden", "read hidden in fp8"):
        assert kernel_of(launch, capability).count(r"ld\.global\.v4\.b32") > 0, launch


@ON_EACH
def test_fp8_is_copied_and_never_converted(capability: int) -> None:
    for launch in ("write requests in fp8", "read hidden in fp8"):
        assert kernel_of(launch, capability).count("e4m3") == 0, launch
