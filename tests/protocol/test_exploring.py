"""The search itself: what it visits, what it copies, and what it calls a counterexample."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.protocol.exploring import BrokenPromise, Numbers, Step, explore, twin
from torch_eaas.protocol.requests import Fate, Original, Request


class Counters:
    """Two counters that go up one by one; ``back`` may set the first to 0."""

    def __init__(
        self, top: int, *, back: bool = False, bad_sum: int = -1, bad_end: int = -1
    ) -> None:
        self.at = [0, 0]
        self.top, self.back, self.bad_sum, self.bad_end = top, back, bad_sum, bad_end

    def steps(self) -> Iterator[Step]:
        for which in (0, 1):
            if self.at[which] < self.top:
                yield Step(up, (which,))
        if self.back and self.at[0]:
            yield Step(reset, (), is_fault=True)

    def check(self) -> None:
        if sum(self.at) == self.bad_sum:
            raise BrokenPromise(f"the sum is {self.bad_sum}")

    def check_end(self) -> None:
        if sum(self.at) == self.bad_end:
            raise BrokenPromise("no way on")


class Wheel(Counters):
    """A counter that goes round for ever."""

    def steps(self) -> Iterator[Step]:
        yield Step(up if self.at[0] < self.top else reset, (0,) if self.at[0] < self.top else ())


def up(world: Counters, which: int) -> None:
    world.at[which] += 1


def reset(world: Counters) -> None:
    world.at[0] = 0


def test_every_state_is_visited_once_whatever_way_led_there() -> None:
    found = explore(Counters(3))
    assert (found.num_states, found.num_ends, found.is_complete) == (16, 1, True)
    assert found.taken == {"up": 24}


def test_a_bound_leaves_aside_what_lies_deeper() -> None:
    found = explore(Counters(3), max_depth=2)
    # 1 + 2 + 3 states of no, one and two steps
    assert (found.num_states, found.is_complete) == (6, False)


def test_a_counterexample_is_a_shortest_one() -> None:
    with pytest.raises(BrokenPromise, match=r"^the sum is 2; after up 0, up 0$"):
        explore(Counters(3, bad_sum=2))


def test_an_end_that_is_not_in_order_is_a_counterexample() -> None:
    with pytest.raises(BrokenPromise, match=r"^no way on, for ever; after up 0, up 1$"):
        explore(Counters(1, bad_end=2))


def test_a_world_has_ended_when_only_faults_could_still_happen() -> None:
    found = explore(Counters(1, back=True))
    assert (found.num_states, found.num_ends) == (4, 1)
    assert found.taken["reset"] == 2


def test_a_world_that_never_ends_is_a_counterexample() -> None:
    with pytest.raises(BrokenPromise, match=r"^it goes round and never ends; after $"):
        explore(Wheel(2))


def test_a_copy_shares_nothing_and_keeps_one_thing_one() -> None:
    share = Original(0.0, 1.0, 2.0)
    first, second = [Request("a")], [Request("b"), Request("c")]
    share.add(first)
    share.add(second)
    first[0].fate = Fate.ANSWERED
    assert share.settle()
    copy = twin(share, {})
    assert Numbers().of(copy) is not None
    numbers = Numbers()
    assert numbers.of(copy) == numbers.of(share)
    # the winner is found by identity
    assert copy.winner is not share.winner
    assert [request.server for request in copy.losers()] == ["b", "c"]
    copy.losers()[0].fate = Fate.LOST
    assert second[0].fate is Fate.WAITING
    assert numbers.of(copy) != numbers.of(share)
