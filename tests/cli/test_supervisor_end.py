"""The end of a supervisor, asked for or not: in order, at once, and with nobody left."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cheap_cluster import CLIENTS, MONITOR, SERVERS, CheapCluster
from launched import is_gone, wait_for

DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); serve()"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_clients_then_servers_then_the_monitor(
    number: signal.Signals, tmp_path: Path
) -> None:
    with CheapCluster(tmp_path, MONITOR, *SERVERS, *CLIENTS) as cluster:
        cluster.ready()
        pids = cluster.pids(MONITOR, *SERVERS, *CLIENTS)
        cluster.send(number)
        assert cluster.end() == 0, cluster.err
        names = cluster.ended()
        assert sorted(names[:2]) == ["client-0", "client-1"]
        assert sorted(names[2:4]) == ["server-0", "server-1"]
        assert names[4:] == ["monitor"]
        assert all(map(is_gone, pids))


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with CheapCluster(tmp_path, MONITOR, replace(SERVERS[0], code=DEAF), CLIENTS[0]) as cluster:
        cluster.ready()
        pids = cluster.pids(MONITOR, SERVERS[0], CLIENTS[0])
        cluster.send(signal.SIGTERM)
        wait_for(lambda: cluster.ended() == ["client-0"] and is_gone(pids[2]), 30)
        assert not is_gone(pids[1])
        cluster.send(signal.SIGINT)
        began = time.monotonic()
        assert cluster.end() == 1
        assert time.monotonic() - began < 5
        assert "server-0: killed before the end that SIGTERM asked for" in cluster.err
        assert all(map(is_gone, pids))


def test_a_signal_in_the_middle_of_the_start_ends_what_was_started(tmp_path: Path) -> None:
    with CheapCluster(tmp_path, MONITOR, replace(SERVERS[0], code="serve()")) as cluster:
        pids = cluster.pids(MONITOR, SERVERS[0])
        cluster.send(signal.SIGTERM)
        assert cluster.end() == 0, cluster.err
        assert cluster.out == b""
        assert all(map(is_gone, pids))


@pytest.mark.parametrize("code", ["ready(); serve()", "serve()"], ids=["serving", "starting"])
def test_nobody_outlives_a_supervisor_that_is_killed(code: str, tmp_path: Path) -> None:
    servers = [replace(server, code=code) for server in SERVERS]
    with CheapCluster(tmp_path, MONITOR, *servers, *CLIENTS) as cluster:
        running = [MONITOR, *servers, *(CLIENTS if "ready" in code else ())]
        pids = cluster.pids(*running)
        assert not any(map(is_gone, pids))
        cluster.process.kill()
        wait_for(lambda: all(map(is_gone, pids)), timeout=2)


def test_each_process_has_a_group_of_its_own_so_that_a_terminals_interrupt_keeps_the_order(
    tmp_path: Path,
) -> None:
    with CheapCluster(tmp_path, MONITOR, SERVERS[0], CLIENTS[0]) as cluster:
        for pid in cluster.pids(MONITOR, SERVERS[0], CLIENTS[0]):
            assert os.getpgid(pid) == pid


def test_what_a_client_started_itself_is_neither_killed_nor_waited_for(tmp_path: Path) -> None:
    # it is in the client's group, holds the client's stderr, and does not listen
    code = 'note(f\'child {os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")}\'); serve()'
    with CheapCluster(tmp_path, MONITOR, replace(CLIENTS[0], code=code)) as cluster:
        child = cluster.started("client-0", 2)
        try:
            cluster.send(signal.SIGTERM)
            assert cluster.process.wait(10) == 0
            assert not is_gone(child)
        finally:
            os.kill(child, signal.SIGKILL)
