from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest

from tests.monitor.party import SHORT, Start, members
from tests.monitor.planned import ALL, MODEL, client, server, wait_until
from torch_eaas.config import MonitorConfig
from torch_eaas.errors import ConfigError
from torch_eaas.monitor.agent import MonitorAgent, fetch_placement
from torch_eaas.monitor.app import MonitorHandle, serve_in_background
from torch_eaas.monitor.link import MonitorLink
from torch_eaas.placement import Placement

SLOW = MonitorConfig(heartbeat=timedelta(seconds=20), lease=timedelta(seconds=60))


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


def test_placements_arrive_in_order_from_many_threads(http: httpx.Client, start: Start) -> None:
    party = start(str(http.base_url), client("c", 1))
    callers = [
        threading.Thread(target=lambda: [party.agent.refresh(SHORT) for _ in range(10)])
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for i in range(20):
        http.post("/join", json=server("s", i + 2).to_json())
    for caller in callers:
        caller.join()
    wait_until(lambda: party.agent.refresh(SHORT) and party.orders[-1] == (1, 21))
    assert party.orders == sorted(set(party.orders))


def test_a_placement_that_is_known_is_not_fetched_again(
    monitor: MonitorHandle, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = start(monitor.url, client("c", 1))
    wait_until(lambda: party.placements)
    fetched: list[str] = []
    monkeypatch.setattr(MonitorLink, "placement", lambda link: fetched.append(link.url))
    time.sleep(0.3)
    assert fetched == []


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
