"""Loading beside the serving, and when a draining server may go: without a server."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.monitor.planned import wait_until
from torch_eaas.placement import Holdings, holdings_from, pairs_of
from torch_eaas.server_drain import QUIET_S, DrainState
from torch_eaas.server_loading import LOADED_TOGETHER, Loading


class Shelf:
    """What a loading adds to, and what was asked of it."""

    def __init__(self, room: int, held: Holdings | None = None, *, can_load: bool = True) -> None:
        self.held = set(pairs_of(held or {}))
        self.parts: list[int] = []
        self.rooms: list[int] = []
        self.fails = False
        self.go = threading.Event()
        self.go.set()
        self.counters: Counter[str] = Counter()
        self.loading = Loading(
            name="s",
            load=self.load if can_load else None,
            room=room,
            holdings=lambda: holdings_from(self.held),
            counters=self.counters,
            notify=lambda: self.rooms.append(self.loading.room),
        )

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert self.go.wait(10)
        if self.fails:
            raise OSError("planned")
        self.parts.append(len(pairs))
        self.held.update(pairs)

    def ask(self, wanted: Holdings) -> None:
        self.loading.ask(wanted)
        wait_until(lambda: self.loading._thread is None)


FORTY: Holdings = {0: tuple(range(40))}


def test_a_load_goes_in_parts_and_each_is_told() -> None:
    shelf = Shelf(room=50)
    shelf.ask(FORTY)
    assert shelf.parts == [LOADED_TOGETHER, LOADED_TOGETHER, 8]
    assert shelf.rooms == [34, 18, 10, 10]
    assert shelf.counters == {"experts_loaded": 40}


@pytest.mark.parametrize(
    ("shelf", "wanted", "parts"),
    [
        pytest.param(Shelf(9), {}, [], id="nothing asked"),
        pytest.param(Shelf(9, {0: (1, 2)}), {0: (1, 2)}, [], id="all held"),
        pytest.param(Shelf(9, {0: (1, 2)}), {0: (1, 2, 3)}, [1], id="some held"),
        pytest.param(Shelf(2), {0: (1, 2, 3)}, [2], id="less room than asked"),
        pytest.param(Shelf(0), {0: (1, 2, 3)}, [], id="no room"),
        pytest.param(Shelf(9, can_load=False), {0: (1,)}, [], id="cannot load"),
    ],
)
def test_what_is_missing_is_loaded_and_never_more_than_the_room(
    shelf: Shelf, wanted: Holdings, parts: list[int]
) -> None:
    shelf.ask(wanted)
    assert shelf.parts == parts


def test_who_cannot_load_has_no_room() -> None:
    assert Shelf(9, can_load=False).loading.room == 0


def test_a_failure_is_told_once_and_the_next_ask_is_tried() -> None:
    shelf = Shelf(room=50)
    shelf.fails = True
    shelf.ask(FORTY)
    assert shelf.loading.trouble == "OSError: planned"
    assert (shelf.counters["load_failures"], shelf.loading.room) == (1, 50)
    shelf.loading.told("")
    assert shelf.loading.trouble, "a report that went out before it says nothing of it"
    shelf.loading.told(shelf.loading.trouble)
    assert shelf.loading.trouble == ""
    shelf.fails = False
    shelf.ask(FORTY)
    assert shelf.counters["experts_loaded"] == 40


def test_an_ask_that_is_repeated_starts_no_second_load() -> None:
    shelf = Shelf(room=50)
    shelf.go.clear()
    for _ in range(3):
        shelf.loading.ask(FORTY)
    shelf.go.set()
    wait_until(lambda: shelf.loading._thread is None)
    assert sum(shelf.parts) == 40


def test_a_stop_ends_a_load_after_the_part_under_way() -> None:
    shelf = Shelf(room=50)
    shelf.go.clear()
    shelf.loading.ask(FORTY)
    shelf.loading.stop()
    shelf.go.set()
    shelf.loading.close()
    assert shelf.parts == [LOADED_TOGETHER]
    shelf.ask(FORTY)
    assert shelf.parts == [LOADED_TOGETHER]


# -- drains ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heard", "now", "last_answer", "alone", "over"),
    [
        pytest.param([], 101.1, 0.0, True, True, id="no monitor, quiet"),
        pytest.param([], 101.1, 100.5, True, False, id="no monitor, asked of late"),
        pytest.param([], 110.0, 0.0, False, False, id="the monitor has not answered"),
        pytest.param([(3, 100.1)], 119.0, 0.0, False, False, id="others still load"),
        pytest.param([(3, 100.1)], 120.1, 120.0, False, True, id="the time is over"),
        pytest.param([(0, 100.1)], 101.0, 0.0, False, False, id="handed over just now"),
        pytest.param([(0, 100.1)], 101.2, 0.0, False, True, id="handed over and quiet"),
        pytest.param([(0, 100.1)], 105.0, 104.5, False, False, id="handed over, asked of late"),
        pytest.param([(3, 100.1), (0, 105.0)], 106.1, 0.0, False, True, id="handed over late"),
        pytest.param([(0, 100.1), (3, 100.6)], 102.0, 0.0, False, False, id="the other one died"),
    ],
)
def test_a_draining_server_goes_when_it_is_replaced_and_quiet(
    heard: list[tuple[int, float]], now: float, last_answer: float, alone: bool, over: bool
) -> None:
    assert QUIET_S == 1
    drain = DrainState(20.0)
    assert not drain.is_over(now, last_answer, is_alone=alone)
    assert drain.begin(100.0)
    assert not drain.begin(105.0)
    for pending, at in heard:
        drain.hear(pending, at)
    assert drain.is_over(now, last_answer, is_alone=alone) == over
