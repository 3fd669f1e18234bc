"""What a fault cost: which forwards count, and for how long."""

from __future__ import annotations

import pytest

from benchmarks.chaos import NUM_SERVERS, met, slowest
from benchmarks.failing_cluster import Hit
from benchmarks.marks import Marks


def marks_of(*forwards: list[tuple[float, float]]) -> Marks:
    """Return marks of each client's forwards: when each began, and what it took."""
    marks = Marks(NUM_SERVERS, len(forwards))
    for client, made in enumerate(forwards):
        for started, took in made:
            marks.record(client, started, took)
    return marks


def hit(process: int, at: float, stood_still: tuple[float, float] | None = None) -> Hit:
    return Hit(process=process, at=at, until=at, in_hand=False, stood_still=stood_still)


def test_what_a_client_stood_still_is_not_its_forwards_time() -> None:
    marks = marks_of([(0, 1), (1, 5), (6, 1.5)], [(0, 1.25)])
    assert slowest(marks, [0, 0], []) == 5
    # of the second forward 4 s are the stop's, and half a second of the third
    stop = hit(NUM_SERVERS, 2.0, (2.0, 6.5))
    assert slowest(marks, [0, 0], [stop]) == 1.25
    assert slowest(marks, [3, 0], [stop]) == 1.25
    # another process that stood still is no excuse
    for process in (0, NUM_SERVERS + 1, NUM_SERVERS + 2):
        assert slowest(marks, [0, 0], [hit(process, 2.0, (2.0, 6.5))]) == 5


def test_a_hit_server_is_met_by_the_forward_under_way_and_the_next_one() -> None:
    marks = marks_of([(0, 1), (1, 2), (3, 4), (7, 8)], [(0, 2.5), (2.5, 16)])
    assert met(marks, [0, 0], [hit(0, 1.5)]) == (4, pytest.approx(2 + 4 + 2.5 + 16))
    assert met(marks, [2, 2], [hit(3, 3.5)]) == (2, pytest.approx(4 + 8))
    # the monitor and clients are on no forward's way
    assert met(marks, [0, 0], [hit(NUM_SERVERS, 1.5), hit(NUM_SERVERS + 2, 1.5)]) == (0, 0)
