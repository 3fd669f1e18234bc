from __future__ import annotations

import pytest

from tests.monitor.planned import MONITOR
from torch_eaas.monitor.events import EventLog

LIFE = f"{MONITOR:016x}"


def log_of(count: int) -> EventLog:
    log = EventLog(MONITOR, capacity=4)
    for number in range(1, count + 1):
        log.add("join", f"event {number}", float(number), (1, number))
    return log


@pytest.mark.parametrize(
    ("count", "after", "numbers"),
    [(0, 0, []), (3, 0, [1, 2, 3]), (3, 2, [3]), (3, 3, []), (63, 0, [60, 61, 62, 63])],
    ids=str,
)
def test_since_gives_what_is_newer_and_still_kept(
    count: int, after: int, numbers: list[int]
) -> None:
    assert [event.number for event in log_of(count).since(after)] == numbers


@pytest.mark.parametrize(
    ("count", "event_id", "resumed"),
    [
        (0, f"{LIFE}-0", 0),
        (3, f"{LIFE}-2", 2),
        (3, f"{LIFE}-3", 3),
        (63, f"{LIFE}-59", 59),
        (63, f"{LIFE}-58", None),
        (3, f"{LIFE}-4", None),
        (3, "000000000000bbbb-2", None),
        (3, "", None),
        (3, "2", None),
        (3, f"{LIFE}-x", None),
        (3, f"{LIFE}-", None),
        (3, f"{LIFE}--1", None),
        (3, f"{LIFE}-" + "9" * 5000, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_listener_resumes_only_where_nothing_was_lost(
    count: int, event_id: str, resumed: int | None
) -> None:
    assert log_of(count).resume(event_id) == resumed


def test_recent_events_come_newest_first() -> None:
    assert [event.text for event in log_of(9).recent(2)] == ["event 9", "event 8"]
