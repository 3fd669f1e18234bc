"""Slow, stuck, dead or away for a moment: each is told apart, and none is made worse."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from datetime import timedelta

import pytest
import torch

from tests.monitor.party import members
from tests.monitor.planned import FAST, client, server, wait_until
from tests.served import LAYERS, D, E, K, PlannedExperts, batch, call, oracle, pool, served
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.errors import ExpertUnavailable
from torch_eaas.monitor.agent import MonitorAgent
from torch_eaas.monitor.announcement import ModelInfo
from torch_eaas.monitor.app import serve_in_background
from torch_eaas.monitor.link import MonitorLink
from torch_eaas.placement import Placement
from torch_eaas.server import ExpertServer

MS = timedelta(milliseconds=1)
MODEL = ModelInfo(fingerprint="", layers=LAYERS, num_experts=E)


def right(client: Client, layer: int = 1) -> None:
    inputs = batch(8)
    out = call(client, layer, *inputs)
    torch.testing.assert_close(out.double(), oracle(layer, *inputs), rtol=1e-5, atol=1e-5)


def test_a_servers_first_answer_may_take_longer_than_all_that_follow() -> None:
    with served(1) as cluster:
        client = cluster.client(request_timeout=100 * MS, recovery_timeout=50 * MS)
        cluster.experts[0].hold()
        threading.Timer(0.5, cluster.experts[0].go.set).start()
        began = time.monotonic()
        right(client)
        assert time.monotonic() - began > 0.4, "it was late, and waited for"
        cluster.experts[0].hold()
        with pytest.raises(ExpertUnavailable, match=r"had no answer from s0 within 0\.\d+ s"):
            call(client, 1, *batch(8))
        cluster.experts[0].go.set()


def test_all_holders_of_an_expert_share_one_budget_of_time() -> None:
    with served(3, copies=3) as cluster:
        client = cluster.client(
            request_timeout=300 * MS, recovery_timeout=100 * MS, hedge_after=20 * MS
        )
        for layer in LAYERS:
            for experts in cluster.experts:
                experts.batches.clear()
            while not all(experts.batches for experts in cluster.experts):
                right(client, layer)
        for experts in cluster.experts:
            experts.hold()
        began = time.monotonic()
        with pytest.raises(ExpertUnavailable):
            call(client, 1, *batch(8))
        # not a fresh 0.3 s for each of the three
        assert 0.3 < time.monotonic() - began < 0.8


def test_late_and_gone_are_told_apart_and_each_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with served(2, copies=2) as cluster:
        client = cluster.client(hedge_after=300 * MS)
        late, gone = (
            f"client client: server s{i} is {how}" for i, how in ((0, "late"), (1, "gone"))
        )
        cluster.experts[0].hold()
        for _ in range(4):
            right(client)
        cluster.experts[0].go.set()
        wait_until(lambda: "client client: server s0 is back" in caplog.messages)
        cluster.servers[1]._listener.close()  # what the end of its process does
        wait_until(lambda: gone in caplog.messages)
        for _ in range(4):
            right(client)
        # time for many looks at the server that is not there
        time.sleep(0.5)
    assert (caplog.messages.count(late), caplog.messages.count(gone)) == (1, 1)
    assert not any("s0 is gone" in line or "s1 is late" in line for line in caplog.messages)
    assert sum("server s1" in line for line in caplog.messages) <= 4


def test_servers_that_come_and_go_leave_nothing_in_their_client() -> None:
    kept: list[int] = []
    config = ClientConfig(hidden_size=D, top_k=K)
    with (
        serve_in_background(FAST) as monitor,
        Client(config, monitor=monitor.url, transport=SharedMemoryTransport()) as ours,
    ):
        for i in range(6):
            comes = ExpertServer(
                pool(),
                ServerConfig(name=f"s{i}"),
                transport=SharedMemoryTransport(),
                monitor=monitor.url,
                model=MODEL,
            )
            with comes.serve_in_background():
                wait_until(lambda n=i: list(ours._connections.live) == [f"s{n}"])  # type: ignore[misc]
                right(ours)
            wait_until(lambda: not ours._connections.live)
            gc.collect()
            kept.append(len(os.listdir("/proc/self/fd")) + threading.active_count())
        # the first one opens what stays; the monitor's connections take a moment to close
        wait_until(
            lambda: len(os.listdir("/proc/self/fd")) + threading.active_count() <= kept[0] + 2
        )


def test_a_server_whose_experts_take_longer_than_a_lease_keeps_its_lease() -> None:
    experts = PlannedExperts(pool())
    transport = LoopbackTransport()
    with serve_in_background(FAST) as monitor:
        busy = ExpertServer(
            experts,
            ServerConfig(name="busy"),
            transport=transport,
            monitor=monitor.url,
            model=MODEL,
        )
        config = ClientConfig(hidden_size=D, top_k=K)
        with (
            busy.serve_in_background(),
            Client(config, monitor=monitor.url, transport=transport) as asks,
        ):
            asks.wait_ready(LAYERS, E)
            experts.hold()
            ticket = asks.dispatch(1, *batch(8), num_experts=E)
            assert experts.entered.wait(5)
            # heartbeats come from a thread of their own, and tell that nothing is served
            with MonitorLink(monitor.url, timedelta(seconds=5)) as link:
                wait_until(lambda: link.call("GET", "/members")["servers"][0]["stuck"])
                told = link.call("GET", "/members")
            assert [each["name"] for each in told["servers"]] == ["busy"]
            assert told["suspects"] == []
            experts.go.set()
            out = asks.combine(ticket)
            torch.testing.assert_close(out.double(), oracle(1, *batch(8)), rtol=1e-5, atol=1e-5)


def test_a_member_that_takes_no_placement_keeps_none_from_the_others() -> None:
    names: list[list[str]] = []
    hangs, go = threading.Event(), threading.Event()

    def hang(placement: Placement) -> None:
        hangs.set()
        go.wait(20)

    def take(placement: Placement) -> None:
        names.append([each.name for each in placement.servers])

    with (
        serve_in_background(FAST) as monitor,
        MonitorAgent(monitor.url, lambda: client("hangs", 1), hang),
        MonitorAgent(monitor.url, lambda: client("takes", 2), take),
    ):
        assert hangs.wait(5)
        with MonitorAgent(monitor.url, lambda: server("new", 3), lambda _: None):
            wait_until(lambda: names and names[-1] == ["new"])
            assert members(monitor.url, "servers") == ["new"]
        go.set()
