"""Waits end with the word, at their deadline, or when another wait gives up; gates hold stages."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from tests.ops.windowed import Pair, client_of, numbers
from torch_eaas.errors import ConfigError
from torch_eaas.ops.pair_table import ClientTables
from torch_eaas.ops.reference_client import WAIT_FAILED, Outcome, Waited, missing_word
from torch_eaas.ops.signal import wait_free, wait_replies
from torch_eaas.protocol.layout import Status
from torch_eaas.protocol.words import MAX_SEQUENCE

pytestmark = pytest.mark.usefixtures("implementation", "poisoned_empty")

NOTHING, ARRIVED, TIMED_OUT, ABORTED, REFUSED, STRANGE = Waited
ENOUGH_US = 10**8
LAYER = 40


def wait(
    tables: ClientTables,
    counts: list[int],
    *,
    abort: Tensor | None = None,
    gate: Tensor | None = None,
    looks: int = 3,
) -> tuple[list[int], Tensor]:
    """Wait for replies; return what became of each wait, and the headers."""
    abort, gate = numbers(0) if abort is None else abort, numbers(0) if gate is None else gate
    arrivals_P = numbers(*[0] * len(counts), dtype=torch.int32)
    outcomes_PO = torch.zeros(len(counts), len(Outcome), dtype=torch.int64)
    wait_replies(
        tables,
        numbers(*counts, dtype=torch.int32),
        gate,
        arrivals_P,
        abort,
        outcomes_PO,
        layer=LAYER,
        timeout_us=ENOUGH_US,
        looks=looks,
    )
    # the gate says what the abort word says, and no arrival is left
    assert gate.tolist() == abort.tolist()
    assert arrivals_P.tolist() == [0] * len(counts)
    is_waited_P = outcomes_PO[:, 0] != NOTHING
    assert outcomes_PO[:, 1].tolist() == (LAYER * is_waited_P).tolist()
    return outcomes_PO[:, 0].tolist(), outcomes_PO[:, 2:]


def test_each_pair_is_waited_for_by_its_own_word_and_the_abort_word_is_set_once_one_gives_up() -> (
    None
):
    pairs: list[Pair | None] = [Pair(instance=i + 1) for i in range(5)]
    tables = client_of(pairs, [0, 1, 2, 3, 0])
    tables.words_PS[:] = 0x501
    assert pairs[1] is not None
    assert pairs[4] is not None
    pairs[1].reply(1, 0x502, size=2, queue_us=30, experts_us=2**32 - 1)
    pairs[4].reply(0, 0x502, placement_version=9)
    abort = numbers(0)
    waited, replies_PF = wait(tables, [0, 2, 1, 1, 1], abort=abort)
    # the third and fourth pairs are silent; what has come counts, whoever gave up
    assert waited == [NOTHING, ARRIVED, TIMED_OUT, ABORTED, ARRIVED]
    assert abort.tolist() == [1]
    nothing = [0] * 8
    assert replies_PF.tolist() == [
        nothing,
        [2, 1, 5, 0, 0, 2, 30, 2**32 - 1],
        nothing,
        nothing,
        [5, 1, 5, 9, 0, 1, 0, 0],
    ]


def test_a_wait_that_ends_well_leaves_the_abort_word_alone() -> None:
    pair = Pair()
    pair.reply(3, (MAX_SEQUENCE << 8) | 2)
    tables = client_of([pair], [3])
    # the highest bit of the word is set
    tables.words_PS[0, 3] = -256 | 1
    abort = numbers(0)
    assert wait(tables, [1], abort=abort)[0] == [ARRIVED]
    assert abort.tolist() == [0]


@pytest.mark.parametrize(
    "word", [0, 0x402, 0x501, 0x602, 0x500], ids=["none", "late", "own", "next", "no state"]
)
def test_no_other_word_is_an_answer(word: int) -> None:
    pair = Pair()
    pair.reply(0, word)
    tables = client_of([pair], [0])
    tables.words_PS[0, 0] = 0x501
    assert wait(tables, [1])[0] == [TIMED_OUT]


@pytest.mark.parametrize("status", [Status.UNKNOWN_EXPERT, Status.STALE, 99], ids=str)
def test_an_error_is_a_refusal_that_aborts_the_step(status: int) -> None:
    pair = Pair()
    pair.reply(0, 0x102, status=status, size=0)
    tables = client_of([pair], [0])
    tables.words_PS[0, 0] = 0x101
    abort = numbers(0)
    waited, replies_PF = wait(tables, [1], abort=abort)
    assert waited == [REFUSED]
    assert replies_PF[0, 4].item() == status
    assert abort.tolist() == [1]


@pytest.mark.parametrize("changed", [{"instance": 8}, {"epoch": 2}], ids=str)
def test_an_answer_of_another_instance_or_epoch_does_not_count(changed: dict[str, int]) -> None:
    pair = Pair()
    pair.reply(0, 0x102, **changed)
    tables = client_of([pair], [0])
    tables.words_PS[0, 0] = 0x101
    abort = numbers(0)
    assert wait(tables, [1], abort=abort)[0] == [STRANGE]
    assert abort.tolist() == [1]


def test_behind_a_closed_gate_nobody_waits_and_nothing_is_noted() -> None:
    tables = client_of([Pair(), Pair()], [0, 0])
    tables.words_PS[:] = 0x101
    abort = numbers(missing_word(3, 5))
    gate = abort.clone()
    assert wait(tables, [1, 1], abort=abort, gate=gate, looks=10**9)[0] == [NOTHING, NOTHING]
    assert abort.tolist() == [missing_word(3, 5)]


def test_a_step_that_was_aborted_before_costs_one_look_a_pair() -> None:
    tables = client_of([Pair(), Pair()], [0, 0])
    tables.words_PS[:] = 0x101
    # a wait for the whole budget would take hours
    assert wait(tables, [1, 1], abort=numbers(1), looks=10**9)[0] == [ABORTED, ABORTED]


def test_a_wait_under_way_sees_the_word_that_another_thread_stores() -> None:
    pair = Pair()
    tables = client_of([pair], [2])
    tables.words_PS[0, 2] = 0x701

    def answer() -> None:
        time.sleep(0.05)
        pair.reply(2, 0x702)

    thread = threading.Thread(target=answer)
    thread.start()
    assert wait(tables, [1], looks=10**7)[0] == [ARRIVED]
    thread.join(10)


def test_a_wait_under_way_ends_when_another_one_gives_up() -> None:
    tables = client_of([Pair()], [0])
    tables.words_PS[:] = 0x101
    abort = numbers(0)

    def give_up() -> None:
        time.sleep(0.05)
        abort.fill_(1)

    thread = threading.Thread(target=give_up)
    thread.start()
    # a wait for the whole budget would take hours
    assert wait(tables, [1], abort=abort, looks=10**9)[0] == [ABORTED]
    thread.join(10)


def test_a_slot_is_free_once_its_last_request_is_answered_whoever_reads_the_answer() -> None:
    pairs: list[Pair | None] = [Pair() for _ in range(4)]
    tables = client_of(pairs, [0, 1, 2, 3])
    words = ((0, 0), (0x301, 0x302), (0x301, 0x202), (0x301, 0x302))
    for p, (request_word, reply_word) in enumerate(words):
        pair = pairs[p]
        assert pair is not None
        tables.words_PS[p, p] = request_word
        # an error's header: a wait for a free slot reads none
        pair.reply(p, reply_word, status=Status.INTERNAL)
    abort = numbers(0)
    counts_P = numbers(1, 1, 1, 1, dtype=torch.int32)
    outcomes_PO = torch.full((4, len(Outcome)), -77)
    wait_free(
        *(tables, counts_P, numbers(0), numbers(0, dtype=torch.int32), abort, outcomes_PO),
        layer=LAYER,
        timeout_us=ENOUGH_US,
        looks=2,
    )
    # never used; answered; the answer to the request before; answered
    untouched = [-77] * len(Outcome)
    timed_out = [TIMED_OUT, LAYER, *[0] * 8]
    assert outcomes_PO.tolist() == [untouched, untouched, timed_out, untouched]
    assert abort.tolist() == [WAIT_FAILED]


@pytest.mark.parametrize("count", [0, 1], ids=["not asked", "behind a closed gate"])
def test_the_outcome_of_who_is_not_waited_for_stays_as_it_was(count: int) -> None:
    tables = client_of([Pair()], [0])
    outcomes_PO = torch.full((1, len(Outcome)), -77)
    arrivals_P = numbers(0, dtype=torch.int32)
    for wait_any in (wait_replies, wait_free):
        gate, abort = numbers(count), numbers(count)
        wait_any(
            *(tables, numbers(count, dtype=torch.int32), gate, arrivals_P, abort, outcomes_PO),
            layer=LAYER,
            timeout_us=ENOUGH_US,
            looks=2,
        )
    assert outcomes_PO.tolist() == [[-77] * len(Outcome)]


def test_a_failed_wait_leaves_the_reason_that_came_first() -> None:
    tables = client_of([Pair()], [0])
    tables.words_PS[:] = 0x101
    abort = numbers(missing_word(3, 5))
    assert wait(tables, [1], abort=abort)[0] == [ABORTED]
    assert abort.tolist() == [missing_word(3, 5)]


def test_the_end_of_a_wait_closes_the_gate_of_the_stages_behind_it_whoever_set_the_abort_word() -> (
    None
):
    pair = Pair()
    tables = client_of([pair], [0])
    tables.words_PS[:] = 0x101
    pair.reply(0, 0x102)
    # another micro-batch has failed, while this one's answer has come
    abort, gate = numbers(WAIT_FAILED), numbers(0)
    assert wait(tables, [1], abort=abort, gate=gate)[0] == [ARRIVED]
    assert gate.tolist() == [WAIT_FAILED]
    # a step begins anew
    abort.zero_()
    gate.zero_()
    assert wait(tables, [1], abort=abort, gate=gate)[0] == [ARRIVED]


def test_a_failed_wait_ends_those_behind_it_for_one_budget_in_all() -> None:
    tables = client_of([Pair()], [0])
    tables.words_PS[:] = 0x101
    abort, gate = numbers(0), numbers(0)
    ended = []
    for _ in range(5):
        ended += wait(tables, [1], abort=abort, gate=gate, looks=2 if not ended else 10**9)[0]
    assert ended == [TIMED_OUT, NOTHING, NOTHING, NOTHING, NOTHING]


def test_counts_of_another_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"counts_P must be int32, got torch.int64; cast it"):
        wait_free(
            *(client_of([Pair()], [0]), numbers(1), numbers(0), numbers(0, dtype=torch.int32)),
            *(numbers(0), numbers(0)[None]),
            layer=0,
            timeout_us=1,
            looks=1,
        )


@pytest.mark.parametrize("name", ["timeout_us", "looks"])
def test_a_wait_without_a_bound_is_refused(name: str) -> None:
    bounds = {"timeout_us": 1, "looks": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 1, got 0"):
        wait_free(
            client_of([Pair()], [0]),
            numbers(1, dtype=torch.int32),
            numbers(0),
            numbers(0, dtype=torch.int32),
            numbers(0),
            numbers(0)[None],
            layer=0,
            **bounds,
        )
