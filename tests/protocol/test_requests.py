"""Exactly once: which alternative counts, and what the driver is told to do."""

from __future__ import annotations

import itertools
import random

import pytest

from torch_eaas.protocol.requests import Fate, Need, Original, Request

SENT, HEDGE_AFTER, TIMEOUT = 100.0, 0.1, 1.0


def original(*alternatives: tuple[str, ...]) -> tuple[Original, list[list[Request]]]:
    """Return an original and the requests of its alternatives, one for each server named."""
    made = Original(SENT, HEDGE_AFTER, TIMEOUT)
    requests = [[Request(server) for server in servers] for servers in alternatives]
    for alternative in requests:
        made.add(alternative)
    return made, requests


def test_nothing_counts_before_an_answer_has_come() -> None:
    share, [[first]] = original(("a",))
    assert not share.settle()
    assert share.winner is None
    assert share.waiting() == [first]
    assert share.need(SENT) is Need.NOTHING


def test_an_answered_original_needs_nothing_more_however_late_it_is() -> None:
    share, [[first]] = original(("a",))
    first.fate = Fate.ANSWERED
    assert share.settle()
    assert share.winner == [first]
    assert share.need(SENT + 100) is Need.NOTHING
    assert share.losers() == []


def test_an_alternative_of_several_requests_counts_only_when_all_have_answered() -> None:
    share, [[late], [left, right]] = original(("a",), ("b", "c"))
    left.fate = Fate.ANSWERED
    assert not share.settle()
    right.fate = Fate.ANSWERED
    assert share.settle()
    assert share.winner == [left, right]
    assert share.losers() == [late]


def test_the_first_complete_alternative_wins_and_a_later_answer_changes_nothing() -> None:
    share, [[first], [second]] = original(("a",), ("b",))
    second.fate = Fate.ANSWERED
    assert share.settle()
    first.fate = Fate.ANSWERED
    assert share.settle()
    assert share.winner == [second]
    assert share.losers() == [first]


def test_contributions_of_two_alternatives_are_never_mixed() -> None:
    # half of each has answered: together they would cover everything, and still nothing counts
    share, [[a_left, a_right], [b_left, b_right]] = original(("a", "b"), ("c", "d"))
    a_left.fate = b_right.fate = Fate.ANSWERED
    a_right.fate = b_left.fate = Fate.LOST
    assert not share.settle()
    assert share.need(SENT) is Need.RESEND


@pytest.mark.parametrize("seed", range(20))
def test_whatever_order_answers_come_in_exactly_one_complete_alternative_counts(
    seed: int,
) -> None:
    rng = random.Random(seed)
    names = (f"s{i}" for i in itertools.count())
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 4))]
    share, alternatives = original(*(tuple(next(names) for _ in range(n)) for n in sizes))
    order = [request for requests in alternatives for request in requests]
    rng.shuffle(order)
    expected: list[Request] | None = None
    for request in order:
        request.fate = rng.choice([Fate.ANSWERED, Fate.ANSWERED, Fate.LOST])
        complete = [a for a in alternatives if all(r.fate is Fate.ANSWERED for r in a)]
        if expected is None and complete:
            [expected] = complete
        assert share.settle() == (expected is not None)
        assert share.winner is expected
    if expected is not None:
        counted = [*expected, *share.losers()]
        assert sorted(map(id, counted)) == sorted(map(id, order))


def test_a_late_original_is_hedged_once_and_keeps_waiting_for_both() -> None:
    share, [[first]] = original(("a",))
    before, after = SENT + HEDGE_AFTER * 0.99, SENT + HEDGE_AFTER
    assert share.need(before) is Need.NOTHING
    assert share.need(after) is Need.HEDGE
    hedge = Request("b")
    share.add([hedge])
    share.hedged(share.deadline)
    assert share.need(after) is Need.NOTHING
    assert share.need(SENT + TIMEOUT * 0.99) is Need.NOTHING
    assert share.waiting() == [first, hedge]


def test_a_hedge_that_nobody_could_take_is_not_asked_for_again() -> None:
    share, _ = original(("a",))
    assert share.need(SENT + 0.2) is Need.HEDGE
    share.hedged(share.deadline)
    assert share.need(SENT + 0.3) is Need.NOTHING


def test_a_lost_request_is_sent_again_at_once_without_waiting_for_the_hedge() -> None:
    share, [[first]] = original(("a",))
    first.fate = Fate.LOST
    assert share.need(SENT) is Need.RESEND
    share.add([Request("b")])
    assert share.need(SENT) is Need.NOTHING


def test_one_lost_request_of_an_alternative_makes_all_of_it_hopeless() -> None:
    share, [[left, right]] = original(("a", "b"))
    left.fate, right.fate = Fate.ANSWERED, Fate.LOST
    assert share.need(SENT) is Need.RESEND


def test_a_lost_original_needs_nothing_while_its_hedge_may_still_answer() -> None:
    share, [[first], [hedge]] = original(("a",), ("b",))
    share.hedged(share.deadline)
    first.fate = Fate.LOST
    assert share.need(SENT + 0.5) is Need.NOTHING
    hedge.fate = Fate.LOST
    assert share.need(SENT + 0.5) is Need.RESEND


def test_an_original_expires_at_its_deadline_whether_it_waits_or_is_lost() -> None:
    share, [[first]] = original(("a",))
    assert share.need(SENT + TIMEOUT) is Need.EXPIRE
    first.fate = Fate.LOST
    assert share.need(SENT + TIMEOUT) is Need.EXPIRE
    assert share.need(SENT + TIMEOUT * 0.99) is Need.RESEND


def test_an_answer_that_was_read_before_the_deadline_is_looked_at_counts() -> None:
    share, [[first]] = original(("a",))
    first.fate = Fate.ANSWERED
    share.settle()
    assert share.need(SENT + TIMEOUT) is Need.NOTHING


def test_the_servers_that_were_tried_are_named_once_in_the_order_they_were_asked() -> None:
    share, _ = original(("b",), ("a", "c"), ("b", "d"))
    assert share.tried == ["b", "a", "c", "d"]
    assert [request.server for request in share.requests()] == ["b", "a", "c", "b", "d"]


def test_everything_but_the_winner_is_a_loser_and_before_a_winner_everything_is() -> None:
    share, [[first], [left, right]] = original(("a",), ("b", "c"))
    assert share.losers() == [first, left, right]
    first.fate = Fate.ANSWERED
    share.settle()
    assert share.losers() == [left, right]
    assert share.waiting() == [left, right]
