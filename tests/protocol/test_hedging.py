"""When a request is late, and how many extra ones a client may send."""

import pytest

from torch_eaas.protocol.hedging import (
    ALWAYS,
    FEW,
    KEPT,
    SHORTEST_S,
    UNKNOWN_S,
    WINDOW_S,
    HedgeBudget,
    Latencies,
)

MS = 0.001


def test_a_request_is_late_after_three_times_the_p99_of_its_size_class() -> None:
    latencies = Latencies()
    for _ in range(KEPT - 1):
        latencies.add(5, 10 * MS)
    latencies.add(5, 1.0)
    # one stall in 128 is not the p99
    assert latencies.late_after(5) == latencies.late_after(7) == pytest.approx(30 * MS)
    assert latencies.late_after(8) == UNKNOWN_S


def test_few_latencies_say_nothing_yet() -> None:
    latencies = Latencies()
    for number in range(FEW):
        assert latencies.late_after(1) == UNKNOWN_S, number
        latencies.add(1, 10 * MS)
    assert latencies.late_after(1) == pytest.approx(30 * MS)


def test_nothing_is_late_before_five_milliseconds() -> None:
    latencies = Latencies()
    for _ in range(FEW):
        latencies.add(1, 0.1 * MS)
    assert latencies.late_after(1) == SHORTEST_S == 5 * MS


def test_a_server_that_becomes_slow_is_late_later_within_a_few_of_its_answers() -> None:
    latencies = Latencies()
    for _ in range(KEPT):
        latencies.add(1, 10 * MS)
    for _ in range(KEPT // 4):
        latencies.add(1, 40 * MS)
    assert latencies.late_after(1) == pytest.approx(120 * MS)


@pytest.mark.parametrize(
    ("requests", "allowed"), [(0, 8), (10, 8), (160, 8), (180, 9), (1000, 50)], ids=str
)
def test_extra_requests_are_a_share_of_the_last_minutes_or_a_few(
    requests: int, allowed: int
) -> None:
    budget = HedgeBudget()
    budget.sent(requests, 100.0)
    assert sum(budget.take(1, 100.0 + i * MS) for i in range(requests + 20)) == allowed


def test_several_extra_requests_are_allowed_together_or_not_at_all() -> None:
    budget = HedgeBudget()
    assert budget.take(ALWAYS - 1, 0.0)
    assert not budget.take(2, 0.0)
    assert budget.take(1, 0.0)


def test_what_is_older_than_a_minute_counts_no_more() -> None:
    budget = HedgeBudget()
    budget.sent(1000, 0.0)
    assert budget.take(50, 1.0)
    assert not budget.take(1, WINDOW_S / 2)
    assert budget.take(ALWAYS, WINDOW_S + 1)
    assert not budget.take(1, WINDOW_S + 1)
