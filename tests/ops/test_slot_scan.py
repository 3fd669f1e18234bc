"""The scan lists what nobody took, one of each client in turn, as the host's book would."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from tests.ops.windowed import SPEC, Pair, numbers, server_of
from torch_eaas.errors import ConfigError
from torch_eaas.ops.pair_table import ServerTables, signed
from torch_eaas.ops.slot_scan import scan_slots
from torch_eaas.protocol.slots import ServerSlots
from torch_eaas.protocol.words import MAX_SEQUENCE

pytestmark = pytest.mark.usefixtures("implementation", "poisoned_empty")

S = SPEC.slots


def scan(tables: ServerTables, now: int = 0, max_requests: int = 8) -> list[int]:
    ready_R, _, num_ready, ended = scan_slots(tables, numbers(now), max_requests)
    assert ended.tolist() == [now]
    listed: list[int] = ready_R.tolist()
    count = int(num_ready)
    assert listed[count:] == [-1] * (max_requests - count)
    assert -1 not in listed[:count]
    return listed[:count]


def scan_all(
    tables: ServerTables, max_tokens: int, **more: int
) -> tuple[list[int], list[int], int]:
    found = scan_slots(tables, numbers(0), 4, max_tokens=max_tokens, **more)
    return found.ready_R.tolist(), found.tokens_R.tolist(), int(found.num_ready)


def take(tables: ServerTables, entries: list[int]) -> None:
    """Note that these were taken, as ``read_requests`` does."""
    for entry in entries:
        pair, slot = divmod(entry, S)
        tables.book_3PS[2, pair, slot] = tables.book_3PS[0, pair, slot]


def test_the_docstrings_example_holds() -> None:
    pairs = [Pair(), Pair(), Pair()]
    pairs[0].set_request_word(1, 0x101)
    pairs[0].set_request_word(2, 0x101)
    pairs[2].set_request_word(3, 0x101)
    tables = server_of(list(pairs))
    tables.turn.fill_(2)
    assert scan(tables, max_requests=4) == [11, 1, 2]
    assert tables.turn.tolist() == [3]


def test_the_docstrings_second_example_holds() -> None:
    pairs = [Pair(), Pair(), Pair()]
    pairs[0].request(1, 0x101, num_tokens=2)
    pairs[0].request(2, 0x101, num_tokens=2)
    pairs[2].request(3, 0x101, num_tokens=3)
    tables = server_of(list(pairs))
    tables.turn.fill_(2)
    assert scan_all(tables, 7) == ([11, 1, 2, -1], [3, 2, 2, 0], 3)
    tables.turn.fill_(2)
    assert scan_all(tables, 5) == ([11, 1, -1, -1], [3, 2, 0, 0], 2)


def test_the_first_is_admitted_whatever_its_size_and_what_is_not_comes_in_its_turn() -> None:
    pairs = [Pair(), Pair(), Pair()]
    tables = server_of(list(pairs))
    for pair, num_tokens in zip(pairs, (1, 3, 1), strict=True):
        pair.request(0, 0x101, num_tokens=num_tokens)
    assert scan_all(tables, 2) == ([0, -1, -1, -1], [1, 0, 0, 0], 1)
    # a longer prefix than that is none: the small one behind the large one waits too
    assert scan_all(tables, 2) == ([S, -1, -1, -1], [3, 0, 0, 0], 1)
    assert scan_all(tables, 2) == ([2 * S, 0, -1, -1], [1, 1, 0, 0], 2)


def test_what_a_hostile_header_says_counts_as_its_slots_room() -> None:
    pairs = [Pair(), Pair()]
    tables = server_of(list(pairs))
    pairs[0].request(0, 0x101, num_tokens=0xFFFFFFFF)
    pairs[1].request(0, 0x101, num_tokens=0)
    assert scan_all(tables, SPEC.max_tokens) == ([0, S, -1, -1], [SPEC.max_tokens, 0, 0, 0], 2)


def test_an_idle_scan_ends_after_its_looks_or_its_time(implementation: str) -> None:
    pair = Pair()
    tables = server_of([pair])
    # the interpreter has no timer, the twin has one
    more = {"wait_us": 50, "looks": 5} if implementation == "kernels" else {"wait_us": 2000}
    assert scan_all(tables, 1, **{"looks": 10**9, **more}) == ([-1] * 4, [0] * 4, 0)
    assert tables.turn.tolist() == [1]


def test_a_scan_that_waits_sees_a_word_that_comes_meanwhile() -> None:
    pair = Pair()
    tables = server_of([pair])
    tables.scanned_P.fill_(7)

    def write() -> None:
        time.sleep(0.02)
        pair.request(2, 0x101, num_tokens=1)

    writer = threading.Thread(target=write)
    writer.start()
    assert scan_all(tables, 1, wait_us=10**8, looks=10**6)[0] == [2, -1, -1, -1]
    writer.join(10)
    # its budget counts from the scan before
    assert int(tables.book_3PS[1, 0, 2]) == 7


def test_nothing_is_listed_where_no_pair_is_open() -> None:
    assert scan(server_of([None, None])) == []


def test_what_was_not_taken_is_listed_again_and_what_was_taken_is_not() -> None:
    pair = Pair()
    tables = server_of([pair])
    for slot in (0, 2, 3):
        pair.set_request_word(slot, 0x101)
    assert scan(tables, max_requests=2) == [0, 2]
    take(tables, [0, 2])
    assert scan(tables) == [3]
    take(tables, [3])
    assert scan(tables) == []
    pair.set_request_word(2, 0x201)
    assert scan(tables) == [2]


def test_a_word_that_grew_past_the_sign_bit_is_newer() -> None:
    pair = Pair()
    tables = server_of([pair])
    tables.book_3PS[:, 0, 1] = signed((1 << 63) - 256 | 1)
    pair.set_request_word(1, 1 << 63 | 1)
    assert scan(tables) == [1]
    take(tables, [1])
    pair.set_request_word(1, MAX_SEQUENCE << 8 | 1)
    assert scan(tables) == [1]
    # an older word is nothing new
    take(tables, [1])
    pair.set_request_word(1, 0x101)
    assert scan(tables) == []


def test_a_pair_with_fewer_slots_has_no_word_behind_its_last() -> None:
    few = Pair(spec=type(SPEC)(hidden_size=6, top_k=2, slots=2, max_tokens=3))
    tables = server_of([few])
    # padding that a hostile client wrote
    few.requests[16:32] = bytes([1, 1, 0, 0, 0, 0, 0, 0] * 2)
    few.set_request_word(1, 0x101)
    assert scan(tables) == [1]


def test_every_client_comes_first_in_its_turn() -> None:
    pairs = [Pair(), Pair(), Pair()]
    tables = server_of(list(pairs))
    for pair in pairs:
        pair.set_request_word(0, 0x101)
        pair.set_request_word(1, 0x101)
    orders = [scan(tables, max_requests=4) for _ in range(4)]
    # nothing is taken, so each scan finds the same six
    assert orders == [
        [0 * S, 1 * S, 2 * S, 0 * S + 1],
        [1 * S, 2 * S, 0 * S, 1 * S + 1],
        [2 * S, 0 * S, 1 * S, 2 * S + 1],
        [0 * S, 1 * S, 2 * S, 0 * S + 1],
    ]


def test_a_random_life_of_three_pairs_leaves_the_books_that_the_host_would_keep() -> None:
    made = random.Random(5)
    pairs = [Pair(), Pair(), Pair()]
    tables = server_of([*pairs, None])
    books = [ServerSlots(S, now=0.0) for _ in pairs]
    words = [[0] * S for _ in pairs]
    waiting: dict[int, float] = {}
    for now in range(1, 40, 3):
        for p, pair in enumerate(pairs):
            for slot in range(S):
                if p * S + slot not in waiting and made.random() < 0.3:
                    words[p][slot] += 0x100 if words[p][slot] else 0x101
                    pair.set_request_word(slot, words[p][slot])
            books[p].scan(words[p], float(now))
            while books[p].num_ready:
                slot, word, since = books[p].take()
                assert word == words[p][slot]
                waiting[p * S + slot] = since
        listed = scan(tables, now, max_requests=4)
        assert len(listed) == min(4, len(waiting))
        assert set(listed) <= set(waiting)
        for p, slot in (divmod(entry, S) for entry in waiting):
            assert tables.book_3PS[:2, p, slot].tolist() == [words[p][slot], waiting[p * S + slot]]
        take(tables, listed)
        for entry in listed:
            del waiting[entry]
    assert tables.scanned_P.tolist() == [now, now, now, 0]


def test_more_slots_than_a_block_holds_are_refused() -> None:
    message = r"at most 8192 slots, .*got 2049 pairs of 4; make room for fewer"
    with pytest.raises(ConfigError, match=message):
        scan_slots(ServerTables.empty(2049, 4), numbers(0), 8)


def test_a_list_of_no_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_requests must be an integer of at least 1, got 0"):
        scan_slots(ServerTables.empty(1, 4), numbers(0), 0)


def test_a_clock_in_float_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"now must be int64, got torch.float32; cast it first"):
        scan_slots(ServerTables.empty(1, 4), torch.zeros(1), 8)
