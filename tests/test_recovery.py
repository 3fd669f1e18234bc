"""Experts that lose their last holder, and servers that leave: nothing that was asked is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import httpx
import pytest
import torch

from tests.monitor.planned import FAST, wait_until
from tests.served import LAYERS, WEIGHTS, E, K, batch, call, oracle, pool
from torch_eaas.client import Client
from torch_eaas.config import ServerConfig
from torch_eaas.errors import ConfigError
from torch_eaas.monitor.announcement import ModelInfo
from torch_eaas.server import ExpertServer
from torch_eaas.server_loading import LOADED_TOGETHER
from torch_eaas.testing import LocalCluster

MODEL = ModelInfo(fingerprint="", layers=LAYERS, num_experts=E)


def right(client: Client, layer: int = 1, seed: int = 0) -> None:
    """Call a layer and compare with the oracle."""
    inputs = batch(5, seed)
    out = call(client, layer, *inputs)
    torch.testing.assert_close(out.double(), oracle(layer, *inputs), rtol=1e-5, atol=1e-5)


def states(cluster: LocalCluster) -> dict[str, str]:
    answer = httpx.get(f"{cluster.monitor_url}/placement", trust_env=False, verify=False)
    return {server["name"]: server["state"] for server in answer.json()["servers"]}


def kinds(cluster: LocalCluster) -> list[str]:
    answer = httpx.get(f"{cluster.monitor_url}/members", trust_env=False, verify=False)
    return [event["kind"] for event in answer.json()["events"]]


class Calling:
    """A thread that calls one layer after the other until it is stopped, and checks each."""

    def __init__(self, client: Client) -> None:
        self.count = 0
        self._client = client
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                right(self._client, LAYERS[self.count % 2], self.count)
                self.count += 1
        except Exception as error:
            self._error = error

    def __enter__(self) -> Calling:
        self._thread.start()
        wait_until(lambda: self.count > 3 or self._error)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(20)
        if self._error is not None:
            raise self._error


@contextmanager
def extra_server(
    cluster: LocalCluster, load: PlannedLoad, room: int = len(WEIGHTS), name: str = "extra"
) -> Iterator[ExpertServer]:
    """Run one more server, which holds nothing and loads in a planned way."""
    server = ExpertServer(
        load.pool,
        ServerConfig(name=name, room=room),
        transport=cluster.transport,
        monitor=cluster.monitor_url,
        model=MODEL,
        load=load,
    )
    with server.serve_in_background():
        yield server


class PlannedLoad:
    """Loads from memory; waits or fails where a test plans it."""

    def __init__(self) -> None:
        self.pool = pool([])
        self.asked: list[int] = []
        self.go = threading.Event()
        self.go.set()
        self.fail_with: Exception | None = None

    def __call__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.asked.append(len(pairs))
        assert self.go.wait(20)
        if self.fail_with is not None:
            raise self.fail_with
        self.pool.update({pair: WEIGHTS[pair] for pair in pairs})


def test_a_call_that_found_no_holder_goes_on_once_a_standby_has_loaded_the_experts() -> None:
    with LocalCluster(WEIGHTS, servers=1, standbys=1, monitor=FAST) as cluster:
        client = cluster.client(top_k=K)
        right(client)
        cluster.kill(0)
        right(client)
        right(client, 3, 1)
        assert states(cluster) == {"server-1": "serving"}
        assert cluster.servers[1].counters()["experts_loaded"] == len(WEIGHTS)


def test_two_standbys_share_what_a_dead_server_held() -> None:
    with LocalCluster(WEIGHTS, servers=2, standbys=2, monitor=FAST) as cluster:
        client = cluster.client(top_k=K)
        cluster.kill(0)
        right(client)
        right(client, 3)
        loaded = [server.counters().get("experts_loaded") for server in cluster.servers[1:]]
        assert loaded == [None, 4, 4], "the other half was still held"


def test_the_last_holder_drains_and_a_client_that_calls_all_the_time_loses_nothing() -> None:
    with LocalCluster(WEIGHTS, servers=1, standbys=1, monitor=FAST) as cluster:
        client = cluster.client(top_k=K, recovery_timeout=timedelta(seconds=0.05))
        with Calling(client) as calling:
            cluster.servers[0].drain()
            assert cluster.servers[0]._left.wait(15)
            before = calling.count
            wait_until(lambda: calling.count > before + 3)
        assert client.counters().get("resends", 0) == 0, "nothing had to be asked twice"


def test_a_draining_server_serves_until_its_experts_are_loaded_elsewhere() -> None:
    load = PlannedLoad()
    load.go.clear()
    with LocalCluster(WEIGHTS, servers=1, monitor=FAST) as cluster, extra_server(cluster, load):
        client = cluster.client(top_k=K)
        wait_until(lambda: "extra" in states(cluster))
        cluster.servers[0].drain()
        wait_until(lambda: load.asked)
        # longer than a server stays that nobody asks
        time.sleep(1.3)
        assert not cluster.servers[0]._left.is_set()
        right(client)
        load.go.set()
        assert cluster.servers[0]._left.wait(15)
        right(client)


def test_a_drain_for_which_nobody_has_room_does_not_wait_for_its_time_limit() -> None:
    with LocalCluster(WEIGHTS, servers=1, monitor=FAST) as cluster:
        wait_until(lambda: states(cluster))
        began = time.monotonic()
        cluster.servers[0].drain()
        assert cluster.servers[0]._left.wait(15)
        assert time.monotonic() - began < 5


def test_a_load_that_fails_is_told_and_hurts_nobody_and_the_ask_moves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, sound = PlannedLoad(), PlannedLoad()
    broken.fail_with = OSError("planned")
    with (
        LocalCluster(WEIGHTS, servers=2, monitor=FAST) as cluster,
        extra_server(cluster, broken, name="broken") as server,
        caplog.at_level(logging.ERROR),
    ):
        client = cluster.client(top_k=K)
        wait_until(lambda: "broken" in states(cluster))
        cluster.kill(0)
        wait_until(lambda: server.counters().get("load_failures"))
        wait_until(lambda: "trouble" in kinds(cluster))
        with extra_server(cluster, sound, name="sound"):
            right(client)
            right(client, 3)
    assert sum(sound.asked) == 8
    assert "server broken could not load experts" in caplog.text


def test_each_part_of_a_load_is_placed_as_soon_as_it_is_there() -> None:
    load = PlannedLoad()
    with LocalCluster(WEIGHTS, servers=1, monitor=FAST) as cluster:
        wait_until(lambda: states(cluster))
        with extra_server(cluster, load, room=3):
            wait_until(lambda: "extra" in states(cluster))
            cluster.kill(0)
            wait_until(lambda: load.pool.holdings)
            wait_until(lambda: states(cluster) == {"extra": "serving", "server-0": "suspect"}, 2)
    assert load.asked == [3], "never more than the room"
    assert LOADED_TOGETHER >= 3


def test_standbys_need_a_monitor() -> None:
    with pytest.raises(ConfigError, match=r"a monitor asks for; give monitor=MonitorConfig\(\)"):
        LocalCluster(WEIGHTS, standbys=1)
