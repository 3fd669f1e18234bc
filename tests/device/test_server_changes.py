"""What may change under one captured iteration: experts, clients, a drain; what is refused."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.conftest import FakeClock
from tests.monitor.planned import wait_until
from tests.served import WEIGHTS, D, I, K, batch, call, oracle
from tests.served_slabs import SPEC, R, T, client_of, server_of, slab
from torch_eaas import server_base
from torch_eaas.client_pairs import Connection
from torch_eaas.client_pieces import Piece
from torch_eaas.config import ServerConfig
from torch_eaas.device.captured import Captured
from torch_eaas.experts import ExpertPool, ExpertWeights
from torch_eaas.protocol.layout import Status
from torch_eaas.server import ExpertServer


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """List the lists of launches that are made."""
    made: list[object] = []
    init = Captured.__init__

    def counted(self: Any, *args: Any, **more: Any) -> None:
        made.append(self)
        init(self, *args, **more)

    monkeypatch.setattr(Captured, "__init__", counted)
    return made


def right(client: Any, layer: int = 1, seed: int = 0) -> None:
    x, ids, w = batch(3, seed)
    got = call(client, layer, x, ids, w)
    torch.testing.assert_close(got.double(), oracle(layer, x, ids, w), rtol=1e-4, atol=1e-4)


def connection_of(client: Any) -> Connection:
    [conn] = client._connections.live.values()
    assert isinstance(conn, Connection)
    return conn


def send(
    client: Any, num_tokens: int, budget_us: int = 10**9, layer: int = 1, ids: Any = None
) -> int:
    """Send a request by hand; return its slot."""
    conn = connection_of(client)
    x, drawn, w = batch(num_tokens)
    ids = drawn if ids is None else ids
    slot = conn.take()
    assert slot is not None
    piece = Piece(0, torch.arange(num_tokens).numpy(), ids.numpy(), w.numpy())
    conn.send(slot, layer, x.numpy(), piece, budget_us, 1)
    return slot


def answered(client: Any, slot: int) -> Status | None:
    """Return what a request was answered with, None if it was not yet."""
    conn = connection_of(client)
    header = conn.header(slot)
    return Status(header.status) if conn.reply_words[slot] >> 8 == header.sequence > 0 else None


def ask(server: Any, client: Any, expert: int) -> tuple[Status | None, torch.Tensor]:
    """Send one token to one expert by hand; return status and row."""
    slot = send(client, 1, ids=torch.full((1, K), expert))
    assert server.step() == 1
    row_D = connection_of(client).rows(slot, 1).clone()[0]
    status = answered(client, slot)
    connection_of(client).slots.release(slot)
    return status, row_D


def row_of(weights: ExpertWeights) -> torch.Tensor:
    """Return what one token's row of ``ask`` is made of."""
    x, _, w = batch(1)
    pool = ExpertPool(D, I)
    pool.add(1, 0, weights)
    row_D: torch.Tensor = pool(x, torch.zeros((1, K), dtype=torch.int64), w)[0]
    return row_D


def test_experts_come_and_go_under_one_capture(captures: list[object]) -> None:
    held = [key for key in WEIGHTS if key != (1, 3)]
    experts = slab(held, slots=len(held) + 1)
    with server_of(experts) as server, client_of(server) as client:
        assert ask(server, client, 3)[0] is Status.UNKNOWN_EXPERT
        experts.add(1, 3, WEIGHTS[1, 3])
        assert experts.num_free == 0
        status, row_D = ask(server, client, 3)
        assert status is Status.OK
        torch.testing.assert_close(row_D, row_of(WEIGHTS[1, 3]), rtol=1e-5, atol=1e-5)
        experts.remove(1, 3)
        assert ask(server, client, 3)[0] is Status.UNKNOWN_EXPERT
        # the slot that was freed takes what replaces another expert
        experts.add(1, 2, WEIGHTS[1, 3])
        status, row_D = ask(server, client, 2)
        assert status is Status.OK
        torch.testing.assert_close(row_D, row_of(WEIGHTS[1, 3]), rtol=1e-5, atol=1e-5)
        assert experts.num_free == 1
    assert len(captures) == 1


def test_an_expert_that_is_not_held_is_refused_by_name_of_its_status() -> None:
    with server_of(slab([(1, 0)])) as server, client_of(server) as client:
        slot = send(client, 1, layer=3)
        assert server.step() == 1
        assert answered(client, slot) is Status.UNKNOWN_EXPERT
        assert server.counters()["refused_unknown_expert"] == 1
        assert "experts_us" in server.counters()


def test_a_client_that_leaves_and_returns_gets_a_window_that_works_and_frees_its_row(
    captures: list[object],
) -> None:
    with server_of(slab(), max_pairs=1).serve_in_background() as server:
        for seed in range(2):
            with client_of(server) as client:
                right(client, seed=seed)
            wait_until(lambda: server.num_clients == 0)
            wait_until(lambda seed=seed: server.counters()["requests"] == seed + 1)
    assert len(captures) == 1


def test_a_second_window_of_one_client_takes_the_place_of_the_first() -> None:
    with server_of(slab(), max_pairs=1).serve_in_background() as server:
        with client_of(server) as client:
            right(client)
            conn = connection_of(client)
            before = conn.epoch
            conn.link.close()
            wait_until(lambda: client._connections.live and connection_of(client).epoch > before)
            right(client, seed=1)
        path: Any = server._path
        wait_until(lambda: path._rows._given_up == [])


def test_a_large_request_is_admitted_first_and_the_next_batch_takes_the_others() -> None:
    # room for four tokens of two rows
    with server_of(slab(), max_rows=8) as server, client_of(server) as a, client_of(server) as b:
        large, small = send(a, T), send(b, 2)
        more = send(b, 2)
        batches = []
        for _ in range(3):
            server.step()
            batches.append(server.counters()["tokens"])
            if len(batches) == 2:
                # whoever was not in the first batch came first in the second
                assert answered(a, large) is answered(b, small) is Status.OK
        assert answered(b, more) is Status.OK
        sizes = [after - before for before, after in pairwise([0, *batches])]
        assert sorted(sizes) in ([0, 4, T], [2, 2, T])


def test_a_request_whose_time_is_over_when_it_is_seen_is_not_computed() -> None:
    with server_of(slab()) as server, client_of(server) as client:
        server.step()
        time.sleep(0.01)
        slot = send(client, 1, budget_us=1000)
        assert server.step() == 1
        assert answered(client, slot) is Status.EXPIRED
        assert server.counters()["tokens"] == 0


def test_a_drain_refuses_what_is_still_there_and_ends() -> None:
    server = server_of(slab(), drain_timeout=timedelta(seconds=0.3))
    with client_of(server) as client:
        thread = threading.Thread(target=server.serve)
        thread.start()
        right(client)
        server.drain()
        right(client, seed=1)
        thread.join(10)
        assert not thread.is_alive()
    assert server.counters()["requests"] == 2


def test_what_comes_as_it_leaves_is_answered_draining() -> None:
    server = server_of(slab())
    with client_of(server) as client:
        slots, conn = [send(client, 1), send(client, 2)], connection_of(client)
        server.close()
        for slot in slots:
            header = conn.header(slot)
            assert header.status == Status.DRAINING
            assert conn.text(slot, header.size) == "this server is leaving; ask another holder"
    assert server.counters()["refused_draining"] == 2


def test_more_than_one_iteration_takes_is_answered_draining_too() -> None:
    spec = replace(SPEC, slots=R + 1)
    with (
        server_of(slab(), spec) as server,
        client_of(server, max_micro_batches=R) as client,
    ):
        slots, conn = [send(client, 1) for _ in range(R + 1)], connection_of(client)
        server.close()
        assert [conn.header(slot).status for slot in slots] == [Status.DRAINING] * (R + 1)


def test_metrics_tell_what_the_device_counted() -> None:
    with server_of(slab()).serve_in_background() as server, client_of(server) as client:
        right(client)
        wait_until(lambda: server.counters()["requests"] == 1)
        text = server._control.metrics()
    assert "torch_eaas_server_requests_total 1.0" in text
    assert "torch_eaas_server_tokens_total 3.0" in text
    assert "torch_eaas_server_pairs 1.0" in text


def test_a_client_goes_on_from_a_device_server_to_a_host_driven_one() -> None:
    pool = ExpertPool(D, I)
    pool.update(WEIGHTS)
    with (
        server_of(slab()).serve_in_background() as device,
        ExpertServer(pool, ServerConfig(name="host")).serve_in_background() as host,
        client_of(device, host) as client,
    ):
        wait_until(lambda: not client._connections.closed)
        for seed in range(4):
            right(client, seed=seed)
        device.close()
        for seed in range(4):
            right(client, seed=seed)
        assert host.counters()["requests"] >= 4


def test_a_batch_that_fails_ends_the_server_and_its_clients_see_that_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("CUDA error: planned")

    with server_of(slab()) as server, client_of(server) as client:
        link = connection_of(client).link
        monkeypatch.setattr(Captured, "replay", fail)
        with pytest.raises(RuntimeError, match="CUDA error: planned"):
            server.serve()
        assert link.closed


def test_a_batch_that_fails_takes_the_server_off_the_monitor_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Agent:
        is_away, closed = False, False

        def __init__(self, *_: object, **__: object) -> None: ...

        def close(self) -> None:
            Agent.closed = True

    def fail(self: object) -> None:
        raise RuntimeError("CUDA error: planned")

    monkeypatch.setattr(server_base, "MonitorAgent", Agent)
    with server_of(slab(), monitor="http://127.0.0.1:1") as server:
        monkeypatch.setattr(Captured, "replay", fail)
        with pytest.raises(RuntimeError, match="CUDA error: planned"):
            server.serve()
    assert Agent.closed


def test_a_slab_outlives_its_server() -> None:
    experts = slab()
    server_of(experts).close()
    with server_of(experts) as server:
        assert server.step() == 0


def test_a_slab_says_what_it_holds_to_clients() -> None:
    with server_of(slab([(1, 0), (3, 2)])) as server:
        assert server._control.describe()["holdings"] == {"1": [0], "3": [2]}


def test_on_a_gpu_counters_come_now_and_then_and_nothing_waits_for_them(clock: FakeClock) -> None:
    with server_of(slab(), clock=clock) as server, client_of(server) as client:
        path: Any = server._path
        # what differs on a GPU is when the host looks
        path._on_gpu = True
        clock.advance(1)
        assert server.step() == 0
        send(client, 1)
        clock.advance(0.01)
        assert server.step() == 0
        assert server.counters()["requests"] == 0
        clock.advance(0.05)
        answered_at = clock()
        assert server.step() == 1
        assert server.counters()["requests"] == 1
        assert path.last_answer == answered_at
        assert path.progress > 0
        # the iteration's first kernel waits, not the host
        path.rest(lambda: False)
        assert clock() == answered_at
