from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.monitor.party import Start, members
from tests.monitor.planned import FAST, MODEL, client, server, wait_until
from torch_eaas.monitor.agent import Announcement, MonitorAgent
from torch_eaas.monitor.app import MonitorHandle, serve_in_background
from torch_eaas.placement import Placement


def test_nothing_waits_long_for_a_monitor_that_hangs(black_hole: str) -> None:
    agent = MonitorAgent(black_hole, lambda: client("c", 1), lambda placement: None)
    began = time.monotonic()
    assert not agent.refresh(timedelta(seconds=0.2))
    assert time.monotonic() - began < 1
    began = time.monotonic()
    agent.close()
    assert time.monotonic() - began < 2.5


def test_refresh_waits_in_vain_for_a_delivery_that_hangs(monitor: MonitorHandle) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hang(placement: Placement) -> None:
        entered.set()
        leave.wait(10)

    with MonitorAgent(monitor.url, lambda: client("c", 1), hang) as agent:
        assert entered.wait(5)
        began = time.monotonic()
        agent.refresh(timedelta(seconds=0.2))
        assert time.monotonic() - began < 5
        leave.set()


def test_the_first_try_may_find_no_monitor(
    free_port: int, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_eaas.monitor.agent")
    party = start(f"http://127.0.0.1:{free_port}", server("s1", 1))
    time.sleep(0.5)
    with serve_in_background(replace(FAST, port=free_port)) as handle:
        wait_until(lambda: party.names)
        assert members(handle.url, "servers") == ["s1"]
    lines = [r.getMessage() for r in caplog.records if r.name == "torch_eaas.monitor.agent"]
    assert "the monitor is away, requests go on without it" in lines[0]
    assert "knows s1 again" in lines[1]
    assert len(lines) <= 3, "one more when the monitor went away again"


def test_a_restarted_monitor_is_told_everything_and_versions_only_grow(
    free_port: int, start: Start
) -> None:
    config = replace(FAST, port=free_port)
    with serve_in_background(config) as handle:
        party = start(handle.url, client("c", 1))
        start(handle.url, server("s1", 2))
        second = start(handle.url, server("s2", 3))
        wait_until(lambda: party.names == ["s1", "s2"])
    second.agent.close()
    with serve_in_background(config):
        wait_until(lambda: party.placements[-1].term == 2)
        assert party.names == ["s1"]
    assert party.orders == sorted(set(party.orders))
    last_before = max(version for term, version in party.orders if term == 1)
    assert party.orders[-1] > (2, last_before)


def test_of_two_monitors_the_higher_term_wins(monitor: MonitorHandle, start: Start) -> None:
    party = start(monitor.url, client("c", 1))
    wait_until(lambda: party.orders == [(1, 1)])
    elsewhere = Placement((server("far", 9).server_info(),), version=10, term=6)
    assert party.agent.offer(elsewhere)
    assert not party.agent.offer(replace(elsewhere, version=9))
    start(monitor.url, server("s1", 2))
    # this monitor hears of the higher term, waits a lease and goes above it
    wait_until(lambda: party.orders[-1] == (7, 11))
    assert party.orders == [(1, 1), (6, 10), (7, 11)]
    assert party.names == ["s1"]


def test_a_member_whose_lease_expired_joins_again(monitor: MonitorHandle, start: Start) -> None:
    pause = threading.Event()
    pause.set()

    def announce() -> Announcement:
        pause.wait(10)
        return server("s1", 1)

    with MonitorAgent(monitor.url, announce, lambda placement: None):
        wait_until(lambda: members(monitor.url, "servers"))
        pause.clear()
        wait_until(lambda: members(monitor.url, "suspects") == ["s1"])
        pause.set()
        wait_until(lambda: members(monitor.url, "servers") == ["s1"])


def test_a_replaced_life_waits_until_the_name_is_free(
    monitor: MonitorHandle, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    party = start(monitor.url, client("c", 9))
    start(monitor.url, server("s1", 1, address="unix:@old"))
    wait_until(lambda: party.names)
    new = start(monitor.url, server("s1", 2, address="unix:@new"))
    wait_until(lambda: party.placements[-1].servers[0].address == "unix:@new")
    wait_until(lambda: "another life has taken the place of s1" in caplog.text)
    time.sleep(0.6)
    assert party.placements[-1].servers[0].address == "unix:@new"
    new.agent.close()
    wait_until(lambda: party.names and party.placements[-1].servers[0].address == "unix:@old")


def test_a_refusal_is_logged_once_in_the_monitors_words(
    monitor: MonitorHandle, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start(monitor.url, server("s1", 1))
    wait_until(lambda: members(monitor.url, "servers"))
    odd = start(monitor.url, server("s2", 2, model=replace(MODEL, fingerprint="odd")))
    wait_until(lambda: "one cluster serves one model" in caplog.text)
    odd.agent.notify()
    time.sleep(0.2)
    assert caplog.text.count("refuses this member") == 1


def test_callbacks_that_fail_are_tried_again_and_logged_once(
    monitor: MonitorHandle, caplog: pytest.LogCaptureFixture
) -> None:
    announced = itertools.count(1)
    delivered = itertools.count(1)
    taken: list[Placement] = []

    def announce() -> Announcement:
        if next(announced) <= 2:
            raise RuntimeError("announce")
        return client("c", 1)

    def take(placement: Placement) -> None:
        if next(delivered) <= 2:
            raise RuntimeError("deliver")
        taken.append(placement)

    with MonitorAgent(monitor.url, announce, take):
        wait_until(lambda: "knows c again" in caplog.text)
    assert len(taken) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "failed" in line] == [
        "this member's callback failed: RuntimeError('announce')",
        "this member's callback failed: RuntimeError('deliver')",
    ]
