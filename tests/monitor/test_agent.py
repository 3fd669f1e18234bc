from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest

from tests.monitor.planned import ALL, FAST, MODEL, client, server, wait_until
from torch_eaas.config import MonitorConfig
from torch_eaas.errors import ConfigError
from torch_eaas.monitor.agent import Announcement, MonitorAgent, fetch_placement
from torch_eaas.monitor.app import MonitorHandle, serve_in_background
from torch_eaas.monitor.link import MonitorLink
from torch_eaas.placement import Placement

SLOW = MonitorConfig(heartbeat=timedelta(seconds=20), lease=timedelta(seconds=60))
SHORT = timedelta(seconds=1)


class Party:
    """A member with an agent: what it announces can be changed, what it is told is kept."""

    def __init__(self, url: str, said: Announcement) -> None:
        self.said = said
        self.placements: list[Placement] = []
        self.threads: list[int] = []
        self.agent = MonitorAgent(url, lambda: self.said, self._take)

    def _take(self, placement: Placement) -> None:
        self.placements.append(placement)
        self.threads.append(threading.get_ident())

    @property
    def names(self) -> list[str]:
        return [s.name for s in self.placements[-1].servers] if self.placements else []

    @property
    def orders(self) -> list[tuple[int, int]]:
        return [placement.order for placement in self.placements]


Start = Callable[[str, Announcement], Party]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts parties and closes their agents."""
    with ExitStack() as stack:

        def new(url: str, said: Announcement) -> Party:
            party = Party(url, said)
            stack.callback(party.agent.close)
            return party

        yield new


@pytest.fixture
def black_hole() -> Iterator[str]:
    """The URL of a socket that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def members(url: str, role: str) -> list[str]:
    with MonitorLink(url, SHORT) as link:
        return [member["label"] for member in link.call("GET", "/members")[role]]


def test_a_client_learns_of_each_server(monitor: MonitorHandle, start: Start) -> None:
    party = start(monitor.url, client("c", 1))
    first = start(monitor.url, server("s1", 2))
    wait_until(lambda: party.names == ["s1"])
    start(monitor.url, server("s2", 3))
    wait_until(lambda: party.names == ["s1", "s2"])
    first.agent.close()
    wait_until(lambda: party.names == ["s2"])
    assert party.orders == sorted(set(party.orders))


def test_a_change_of_state_and_holdings_reaches_clients(
    monitor: MonitorHandle, start: Start
) -> None:
    party = start(monitor.url, client("c", 1))
    told = start(monitor.url, server("s1", 2))
    wait_until(lambda: party.names == ["s1"])
    told.said = replace(told.said, state="draining", holdings={1: (2,)})
    wait_until(lambda: party.placements[-1].servers[0].state == "draining")
    assert party.placements[-1].servers[0].holdings == {1: (2,)}


def test_a_model_that_is_announced_later_is_told(monitor: MonitorHandle, start: Start) -> None:
    party = start(monitor.url, server("s1", 2, {}, model=None))
    wait_until(lambda: party.names == ["s1"])
    party.said = replace(party.said, model=MODEL, holdings=ALL)
    wait_until(lambda: party.placements[-1].servers[0].holdings == ALL)


def test_counters_that_are_no_numbers_are_left_out(monitor: MonitorHandle, start: Start) -> None:
    counters = {"requests": 3, "p99": float("nan"), "Bad name": 1, "peak": float("inf")}
    start(monitor.url, client("c", 1, counters=counters))
    wait_until(lambda: members(monitor.url, "clients"))
    (shown,) = httpx.get(monitor.url + "/members", trust_env=False, verify=False).json()["clients"]
    assert shown["counters"] == {"requests": 3.0}


def test_notify_reports_before_the_next_heartbeat(start: Start) -> None:
    with serve_in_background(SLOW) as handle:
        party = start(handle.url, server("s1", 1))
        wait_until(lambda: party.names)
        party.said = replace(party.said, state="draining")
        party.agent.notify()
        wait_until(lambda: fetch_placement(handle.url).servers[0].state == "draining", 1)


def test_refresh_fetches_in_the_callers_thread(start: Start) -> None:
    with serve_in_background(SLOW) as handle:
        party = start(handle.url, client("c", 1))
        wait_until(lambda: party.placements)
        httpx.post(
            handle.url + "/join", json=server("s1", 2).to_json(), trust_env=False, verify=False
        )
        assert party.agent.refresh(SHORT)
        assert (party.names, party.threads[-1]) == (["s1"], threading.get_ident())
        assert party.agent.refresh(SHORT)
        assert len(party.placements) == 2, "the same placement is not delivered again"


def test_nothing_waits_long_for_a_monitor_that_hangs(black_hole: str) -> None:
    agent = MonitorAgent(black_hole, lambda: client("c", 1), lambda placement: None)
    began = time.monotonic()
    assert not agent.refresh(timedelta(seconds=0.2))
    assert time.monotonic() - began < 1
    began = time.monotonic()
    agent.close()
    assert time.monotonic() - began < 1.3


def test_refresh_waits_in_vain_for_a_delivery_that_hangs(monitor: MonitorHandle) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hang(placement: Placement) -> None:
        entered.set()
        leave.wait(10)

    with MonitorAgent(monitor.url, lambda: client("c", 1), hang) as agent:
        assert entered.wait(5)
        began = time.monotonic()
        agent.refresh(timedelta(seconds=0.2))
        assert time.monotonic() - began < 1
        leave.set()


def test_placements_arrive_in_order_from_many_threads(monitor: MonitorHandle, start: Start) -> None:
    party = start(monitor.url, client("c", 1))
    callers = [
        threading.Thread(target=lambda: [party.agent.refresh(SHORT) for _ in range(10)])
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    with httpx.Client(base_url=monitor.url, trust_env=False, verify=False) as http:
        for i in range(20):
            http.post("/join", json=server("s", i + 2).to_json())
    for caller in callers:
        caller.join()
    assert party.agent.refresh(SHORT)
    assert party.orders == sorted(set(party.orders))
    assert party.orders[-1] == (1, 21)


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


def test_closing_leaves_and_is_safe_twice(monitor: MonitorHandle, start: Start) -> None:
    party = start(monitor.url, client("c", 1))
    wait_until(lambda: members(monitor.url, "clients"))
    party.agent.close()
    party.agent.close()
    assert members(monitor.url, "clients") == []
    assert not party.agent.refresh(SHORT)


def test_an_agent_may_be_closed_in_its_own_callback(monitor: MonitorHandle) -> None:
    agents: list[MonitorAgent] = []
    ready = threading.Event()

    def take(placement: Placement) -> None:
        ready.wait(5)
        agents[0].close()

    agents.append(MonitorAgent(monitor.url, lambda: client("c", 1), take))
    ready.set()
    wait_until(lambda: "eaas-agent" not in {t.name for t in threading.enumerate()})
    assert members(monitor.url, "clients") == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_child_an_agent_does_nothing(monitor: MonitorHandle, start: Start) -> None:
    party = start(monitor.url, server("s1", 1))
    wait_until(lambda: party.names)
    pid = os.fork()
    if pid == 0:
        newer = Placement((), version=0, term=9)
        did = party.agent.refresh(SHORT) or party.agent.offer(newer)
        party.agent.notify()
        party.agent.close()
        os._exit(1 if did else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert members(monitor.url, "servers") == ["s1"]
    assert party.agent.refresh(SHORT)


def test_proxies_are_for_others(
    monitor: MonitorHandle, start: Start, black_hole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", black_hole)
    monkeypatch.setenv("ALL_PROXY", black_hole)
    party = start(monitor.url, server("s1", 1))
    wait_until(lambda: party.names)


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://x", "http://", "http://[::1", "unix:a"])
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="a monitor's URL is http://HOST:PORT, got"):
        MonitorAgent(url, lambda: client("c", 1), lambda placement: None)
