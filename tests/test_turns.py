"""The baton: one computes at a time, nobody polls meanwhile, nobody is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import FakeClock
from torch_eaas.errors import TurnTimeout
from torch_eaas.turns import Ended, Place, Turns

NEVER = 1e9


@dataclass
class World:
    """Micro-batches on a virtual clock: computing and looking take time, threads take none."""

    clock: FakeClock = field(default_factory=FakeClock)
    computing: set[int] = field(default_factory=set)
    log: list[tuple[int, str]] = field(default_factory=list)
    answers: dict[int, float] = field(default_factory=dict)

    def compute(self, index: int, seconds: float) -> None:
        assert not self.computing, f"{index} computes while {self.computing} do"
        self.computing.add(index)
        self.log.append((index, "computes"))
        self.clock.advance(seconds)
        self.computing.discard(index)

    def look(
        self, ready: Callable[[], bool], timeout: float, waited: float = 0.0, *, quiet: float = 0.0
    ) -> bool:
        """Stand for Transport.wait: time passes until the next answer or the timeout."""
        assert not self.computing
        end = self.clock.now + quiet + timeout
        self.clock.now = max(self.clock.now, min([end, *self.answers.values()]))
        return ready()

    def ask(self, place: Place, delay: float, timeout: float = 0.002) -> bool:
        """Wait for an answer that comes after ``delay``, as a client does; return if it came."""
        place.check()
        self.answers[place.index] = at = self.clock.now + delay
        give_up_at = self.clock.now + 1.0

        def ready() -> bool:
            return self.clock.now >= at

        try:
            while not ready():
                if self.clock.now > give_up_at:
                    return False
                place.wait(self.look, ready, timeout)
            return True
        finally:
            del self.answers[place.index]


def run(turns: Turns, works: list[Callable[[Place], object]]) -> list[BaseException | None]:
    """Run each work at its place in a thread; return what each raised."""
    raised: list[BaseException | None] = [None] * len(works)

    def at(place: Place) -> None:
        try:
            place.begin()
            works[place.index](place)
        except BaseException as error:
            raised[place.index] = error
        finally:
            place.end(raised[place.index])

    threads = [threading.Thread(target=at, args=(place,), daemon=True) for place in turns.places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "deadlock"
    return raised


def makespan(count: int, layers: int, compute_s: float, delay_s: float) -> float:
    """Return the virtual seconds that so many equal micro-batches take."""
    world = World()
    turns = Turns(count, NEVER, world.clock)

    def work(place: Place) -> None:
        for _ in range(layers):
            world.compute(place.index, compute_s)
            assert world.ask(place, delay_s)

    began = world.clock.now
    assert run(turns, [work] * count) == [None] * count
    return world.clock.now - began


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("compute_ms", "delay_ms"), [(2, 8), (2, 4), (2, 2), (4, 2), (8, 2)])
def test_equal_micro_batches_take_what_is_possible_and_no_more(
    count: int, compute_ms: int, delay_ms: int
) -> None:
    layers = 8
    a, d = compute_ms / 1000, delay_ms / 1000
    # the first layer of the last one begins late, or the last answer comes when nobody computes
    slack = (count - 1) * a if count * a < a + d else d
    ideal = layers * max(count * a, a + d)
    assert makespan(count, layers, a, d) == pytest.approx(ideal + slack, rel=1e-9)


def test_whoever_has_its_answer_already_goes_on_without_a_switch() -> None:
    world = World()
    turns = Turns(2, NEVER, world.clock)

    def eager(place: Place) -> None:
        for _ in range(5):
            world.compute(place.index, 1.0)
            place.wait(world.look, lambda: True, 1.0)

    run(turns, [eager, eager])
    assert [index for index, _ in world.log] == [0] * 5 + [1] * 5


def test_when_all_wait_the_first_whose_answer_comes_goes_on() -> None:
    world = World()
    turns = Turns(3, NEVER, world.clock)
    delays = [0.5, 0.2, 0.3]

    def work(place: Place) -> None:
        world.compute(place.index, 0.001)
        assert world.ask(place, delays[place.index])
        world.compute(place.index, 0.001)

    run(turns, [work] * 3)
    assert [index for index, _ in world.log] == [0, 1, 2, 1, 2, 0]


def test_whose_time_is_over_has_the_turn_though_no_answer_came() -> None:
    world = World()
    turns = Turns(2, NEVER, world.clock)
    looks = [0, 0]

    def work(place: Place) -> None:
        until = world.clock.now + 0.1
        while world.clock.now < until:
            place.wait(world.look, lambda: False, 0.002)
            looks[place.index] += 1

    run(turns, [work] * 2)
    assert all(30 <= count <= 60 for count in looks), looks


def test_it_is_known_whether_an_answer_came_while_somebody_looked() -> None:
    world = World()
    turns = Turns(2, NEVER, world.clock)
    seen: dict[str, bool] = {}

    def first(place: Place) -> None:
        at = world.clock.now + 0.1
        # the other computes for 1 s meanwhile
        seen["late"] = place.wait(world.look, lambda: world.clock.now >= at, 5.0)

    def second(place: Place) -> None:
        world.compute(place.index, 1.0)
        world.answers[1] = at = world.clock.now + 0.1
        while world.clock.now < at:
            seen["looked"] = place.wait(world.look, lambda: world.clock.now >= at, 5.0)

    assert run(turns, [first, second]) == [None, None]
    assert seen == {"late": False, "looked": True}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_one_ends_the_others_where_they_next_ask(failing: int) -> None:
    world = World()
    turns = Turns(3, NEVER, world.clock)
    error = ValueError("mine")

    def work(place: Place) -> None:
        for step in range(10):
            world.compute(place.index, 0.001)
            if step == 4 and place.index == failing:
                raise error
            world.ask(place, 0.004)

    raised = run(turns, [work] * 3)
    assert turns.error is error
    assert [type(e) for e in raised] == [
        ValueError if index == failing else Ended for index in range(3)
    ]


def test_an_error_that_strikes_who_has_no_turn_leaves_the_turn_where_it_is() -> None:
    turns = Turns(2, 30.0)
    asleep, go = threading.Event(), threading.Event()

    def struck(place: Place) -> None:
        def look(*_: object, **__: object) -> bool:
            raise AssertionError("the other one computes")

        # what a signal does to a thread that sleeps
        def interrupted(*_: object, **__: object) -> bool:
            asleep.set()
            assert go.wait(10)
            raise KeyboardInterrupt

        place.go = type("Lock", (), {"acquire": interrupted, "locked": lambda self: False})()
        place.wait(look, lambda: False, 1.0)

    def other(place: Place) -> None:
        assert asleep.wait(10)
        go.set()
        deadline = time.monotonic() + 10
        while turns.error is None and time.monotonic() < deadline:
            time.sleep(0.001)
        place.check()

    raised = run(turns, [struck, other])
    assert [type(error) for error in raised] == [KeyboardInterrupt, Ended]


def test_one_that_computes_for_too_long_is_named_by_who_waits() -> None:
    turns = Turns(2, 0.05)
    done = threading.Event()

    def hog(place: Place) -> None:
        place.wait(lambda *_, **__: False, lambda: False, 0.001)

    def computes(place: Place) -> None:
        assert done.wait(10)
        place.check()

    message = (
        r"micro-batch 0 waited for micro-batch 1, which has computed for 0\.\d+ s without asking "
        r"for experts; if it does not hang, raise timeout \(now 0\.05 s\)"
    )

    def release() -> None:
        deadline = time.monotonic() + 10
        while turns.error is None and time.monotonic() < deadline:
            time.sleep(0.005)
        done.set()

    threading.Thread(target=release, daemon=True).start()
    raised = run(turns, [hog, computes])
    assert isinstance(raised[1], Ended)
    with pytest.raises(TurnTimeout, match=message):
        raise raised[0] or AssertionError


# -- any schedule ----------------------------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([0.0, 0.001, 0.003, 0.01, 3.0])),
    st.tuples(st.just("compute"), st.sampled_from([0.0, 0.002, 0.005])),
    st.tuples(st.just("raise"), st.just(0.0)),
)
SCHEDULES = st.lists(st.lists(STEPS, max_size=6), min_size=1, max_size=5)


@settings(max_examples=1000)
@given(SCHEDULES)
def test_no_schedule_ends_in_a_deadlock(schedule: list[list[tuple[str, float]]]) -> None:
    world = World()
    turns = Turns(len(schedule), NEVER, world.clock)
    finished = []

    def work(place: Place) -> None:
        for step, seconds in schedule[place.index]:
            if step == "compute":
                world.compute(place.index, seconds)
            elif step == "raise":
                raise ValueError(place.index)
            else:
                # an answer after 3 s is one that never comes: the client gives up after 1 s
                assert world.ask(place, seconds) == (seconds < 3.0)
        finished.append(place.index)

    raised = run(turns, [work] * len(schedule))
    failed = [error for error in raised if isinstance(error, ValueError)]
    assert all(error is None or isinstance(error, (ValueError, Ended)) for error in raised)
    if failed:
        assert turns.error in failed
    else:
        assert sorted(finished) == list(range(len(schedule)))
        assert turns.error is None
