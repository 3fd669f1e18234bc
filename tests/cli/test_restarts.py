from __future__ import annotations

from datetime import timedelta

import pytest

from torch_eaas.cli.restarts import RestartPolicy, Restarts


def delays(policy: RestartPolicy, served: float | None, failures: int) -> list[float | None]:
    """Return what each failure waits for, of a process that serves so long (None: not at all)."""
    restarts = Restarts(policy)
    now = 100.0
    seen: list[float | None] = []
    for _ in range(failures):
        if served is not None:
            restarts.served(now)
            now += served
        at = restarts.failed(now)
        seen.append(None if at is None else at - now)
        now = now if at is None else at
    return seen


@pytest.mark.parametrize(
    ("max_restarts", "served", "expected"),
    [
        (0, 1.0, [None, None]),
        (1, 1.0, [0.5, None]),
        (5, 1.0, [0.5, 1, 2, 4, 8, None, None]),
        (9, None, [0.5, 1, 2, 4, 8, 16, 30, 30, 30, None]),
        (1, 59.5, [0.5, None]),
        (1, 60.0, [0.5, 0.5, 0.5, 0.5]),
        (0, 60.0, [None]),
    ],
    ids=[
        "no restart at all",
        "one restart",
        "the defaults",
        "never serving, up to the longest delay",
        "not quite settled",
        "settled each time",
        "settled, but none is allowed",
    ],
)
def test_the_delays_double_up_to_the_cap(
    max_restarts: int, served: float | None, expected: list[float | None]
) -> None:
    policy = RestartPolicy(max_restarts=max_restarts)
    assert delays(policy, served, len(expected)) == expected


def test_a_long_start_does_not_begin_the_count_anew() -> None:
    restarts = Restarts(RestartPolicy(max_restarts=1))
    assert restarts.failed(0.0) == 0.5
    # an hour of reading a checkpoint, and then no service
    assert restarts.failed(3600.0) is None


def test_a_settled_run_begins_the_back_off_anew() -> None:
    restarts = Restarts(RestartPolicy())
    assert [restarts.failed(float(t)) for t in (0, 10, 20)] == [0.5, 11, 22]
    restarts.served(22.0)
    assert restarts.failed(100.0) == 100.5
    # the old service counts once
    assert restarts.failed(500.0) == 501


def test_a_thousand_restarts_do_not_overflow() -> None:
    policy = RestartPolicy(max_restarts=2000, longest_delay=timedelta(seconds=1))
    assert delays(policy, None, 2001)[-2:] == [1, None]
