from __future__ import annotations

import time

from torch_eaas.cli.killer import Killer


def test_the_kill_comes_between_two_tokens_and_is_told_once() -> None:
    kills: list[float] = []
    killer = Killer(lambda: kills.append(time.monotonic()), after=3)
    told, times = [], []
    for count in range(1, 7):
        times.append(time.monotonic())
        told.append(killer.see(count))
        time.sleep(0.01)
    assert told == [False, False, False, True, False, False]
    assert killer.has_killed
    assert len(kills) == 1
    # halfway: neither at the token nor behind the next one
    assert kills[0] - times[2] >= 0.004


def test_a_text_that_ends_before_has_no_kill() -> None:
    kills: list[int] = []
    killer = Killer(lambda: kills.append(1), after=3)
    assert [killer.see(1), killer.see(2)] == [False, False]
    assert not killer.has_killed
    assert kills == []


def test_after_zero_tokens_means_never() -> None:
    killer = Killer(lambda: None, after=0)
    assert not any(killer.see(count) for count in range(1, 9))
    assert not killer.has_killed
