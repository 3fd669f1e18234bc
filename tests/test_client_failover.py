"""The client, when servers are late, gone, or hold too little."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.monitor.planned import wait_until
from tests.served import LAYERS, WEIGHTS, D, E, K, Served, batch, call, oracle, pool, served
from torch_eaas.client import Client
from torch_eaas.client_pieces import Piece
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.errors import ExpertUnavailable, RequestRefused
from torch_eaas.server import ExpertServer

MS = timedelta(milliseconds=1)
TRANSPORTS = [LoopbackTransport, SharedMemoryTransport]


def assert_right(layer: int, batch_: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), oracle(layer, *batch_), rtol=1e-5, atol=1e-5)


class SuspendedClock:
    """A clock before one look of which the client stands still for 3 s and all answers come."""

    def __init__(self, cluster: Served) -> None:
        self._cluster = cluster
        self._thread = threading.current_thread()
        self._looks = 0
        self._gone = 0.0
        self._client: Client | None = None

    @property
    def was_suspended(self) -> bool:
        return self._client is None

    def suspend_at(self, look: int, client: Client) -> None:
        self._looks, self._client = look, client

    def __call__(self) -> float:
        if threading.current_thread() is self._thread and self._client is not None:
            self._looks -= 1
            if self._looks == 0:
                client, self._client = self._client, None
                for experts in self._cluster.experts:
                    experts.go.set()
                wait_until(lambda: self._answered() == client.counters()["requests"])
                self._gone += 3
        return time.monotonic() + self._gone

    def _answered(self) -> int:
        return sum(s.counters().get("requests", 0) for s in self._cluster.servers)


# -- servers that are late or gone -----------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda t: t.__name__)
def test_a_server_that_closes_with_a_request_in_hand_costs_no_answer(
    transport: type[Transport],
) -> None:
    with served(3, copies=2, transport=transport()) as cluster:
        client = cluster.client(hedge_after=timedelta(seconds=30))
        call(client, 1, *batch(8))
        cluster.experts[1].hold()
        ticket = client.dispatch(1, *batch(8), num_experts=E)
        assert cluster.experts[1].entered.wait(5)
        cluster.servers[1]._listener.close()  # what the end of its process does
        assert_right(1, batch(8), client.combine(ticket))
        cluster.experts[1].go.set()
        assert client.counters()["resends"] >= 1
        for _ in range(3):
            assert_right(3, batch(8), call(client, 3, *batch(8)))


def test_a_late_server_is_hedged_then_avoided_then_taken_back() -> None:
    with served(3, copies=2) as cluster:
        client = cluster.client(hedge_after=20 * MS)
        call(client, 1, *batch(8))
        cluster.experts[1].hold()
        started = time.monotonic()
        assert_right(1, batch(8), call(client, 1, *batch(8)))
        assert time.monotonic() - started < 1
        assert client.counters()["hedges"] == 1
        assert client._connections.suspects == ["s1"]
        before = len(cluster.experts[1].batches)
        for _ in range(3):
            assert_right(3, batch(8), call(client, 3, *batch(8)))
        assert len(cluster.experts[1].batches) == before
        cluster.experts[1].go.set()
        deadline = time.monotonic() + 5
        while client._connections.suspects and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client._connections.suspects == []
        assert_right(1, batch(8), call(client, 1, *batch(8)))
        assert len(cluster.experts[1].batches) > before


def test_a_client_that_was_suspended_blames_nobody_whenever_that_was() -> None:
    with served(2, copies=2) as cluster:
        clock = SuspendedClock(cluster)
        client = cluster.client(clock=clock, hedge_after=timedelta(seconds=2))
        call(client, 1, *batch(8))
        for look in range(1, 12):
            for experts in cluster.experts:
                experts.hold()
            clock.suspend_at(look, client)
            assert_right(1, batch(8, look), call(client, 1, *batch(8, look)))
            assert clock.was_suspended, f"the clock was not looked at {look} times"
            assert client._connections.suspects == []
            counters = client.counters()
            assert {"timeouts", "hedges", "resends"}.isdisjoint(counters), f"look {look}"


def test_a_late_server_without_a_replica_still_counts_when_it_answers() -> None:
    with served(2, copies=1) as cluster:
        client = cluster.client(hedge_after=10 * MS)
        cluster.experts[1].hold()
        threading.Timer(0.1, cluster.experts[1].go.set).start()
        assert_right(1, batch(8), call(client, 1, *batch(8)))
        assert client.counters().get("hedges", 0) == 0


def test_no_answer_in_time_names_who_waited_for_whom_which_layer_and_how_long() -> None:
    with served(2, copies=1) as cluster:
        client = cluster.client(request_timeout=60 * MS, recovery_timeout=40 * MS, name="asker")
        call(client, 1, *batch(8))
        cluster.experts[1].hold()
        message = (
            r"layer 3, expert \d is unavailable \(tried s1\): "
            r"client asker had no answer from s1 within 0\.1\d* s"
        )
        with pytest.raises(ExpertUnavailable, match=message):
            call(client, 3, *batch(8))
        cluster.experts[1].go.set()
        assert_right(3, batch(8), call(client, 3, *batch(8)))


def test_a_window_of_which_no_slot_comes_back_is_replaced_and_late_writes_land_nowhere() -> None:
    with served(1) as cluster:
        client = cluster.client(
            request_timeout=200 * MS, recovery_timeout=50 * MS, max_micro_batches=1
        )
        call(client, 1, *batch(4))
        old = client._connections.live["s0"]
        cluster.experts[0].hold()
        for _ in range(2):
            with pytest.raises(ExpertUnavailable):
                call(client, 1, *batch(4))
        # the server holds its lock until the batch ends: the close waits for its last write
        cluster.experts[0].go.set()
        deadline = time.monotonic() + 10
        while client._connections.live.get("s0") in (old, None) and time.monotonic() < deadline:
            time.sleep(0.01)
            if not old.slots.num_given_up:
                break
        assert_right(1, batch(4), call(client, 1, *batch(4)))


def test_without_a_holder_the_client_waits_for_one_and_then_names_the_expert() -> None:
    with served(2, copies=1) as cluster:
        client = cluster.client(recovery_timeout=300 * MS, hedge_after=10 * MS)
        call(client, 1, *batch(8))
        cluster.servers[1].close()
        with pytest.raises(ExpertUnavailable, match=r"layer 1, expert \d is unavailable") as caught:
            call(client, 1, *batch(8))
        assert caught.value.layer == 1
        assert caught.value.expert % 2 == 1  # server s1 held the odd ones


def test_a_server_that_returns_within_the_recovery_time_saves_the_request() -> None:
    transport = LoopbackTransport()
    config = ServerConfig(name="only", address="loopback:only")
    first = ExpertServer(pool(), config, transport=transport).serve_in_background()
    options = ClientConfig(hidden_size=D, top_k=K)
    with Client(options, servers=[first.address], transport=transport) as client:
        client.wait_ready(LAYERS, E)
        call(client, 1, *batch(4))
        first.close()
        again: list[ExpertServer] = []

        def restart() -> None:
            again.append(ExpertServer(pool(), config, transport=transport).serve_in_background())

        threading.Timer(0.2, restart).start()
        assert_right(1, batch(4), call(client, 1, *batch(4)))
        again[0].close()


def test_an_expert_that_moved_is_found_at_its_new_holder() -> None:
    with served(2, copies=1) as cluster:
        client = cluster.client()
        call(client, 1, *batch(8))
        key = (1, 0)
        cluster.experts[1].inner.add(*key, WEIGHTS[key])
        cluster.experts[0].inner.remove(*key)
        x, ids, w = batch(8)
        ids[:, 0] = 0
        assert_right(1, (x, ids, w), call(client, 1, x, ids, w))
        assert client.counters()["refused_unknown_expert"] >= 1


def test_a_malformed_request_is_refused_with_the_servers_text_and_only_its_sender_hurts() -> None:
    with served(1) as cluster:
        client, other = cluster.client(name="bad"), cluster.client(name="good")
        conn = client._connections.live["s0"]
        send = conn.send

        def send_bad(slot: int, layer: int, x_TD: Any, piece: Piece, *rest: int) -> int:
            piece.ids_nK = piece.ids_nK - 100
            return send(slot, layer, x_TD, piece, *rest)

        conn.send = send_bad  # type: ignore[method-assign]
        with pytest.raises(RequestRefused, match=r"server s0 refused: .*expert id -\d+ is below"):
            call(client, 1, *batch(4))
        conn.send = send  # type: ignore[method-assign]
        assert_right(1, batch(4), call(client, 1, *batch(4)))
        assert_right(1, batch(4), call(other, 1, *batch(4)))


def test_a_budget_for_extra_requests_that_is_used_up_still_fails_nobody() -> None:
    with served(2, copies=2) as cluster:
        client = cluster.client(hedge_after=5 * MS, request_timeout=400 * MS)
        while client._engine._budget.take(1, time.monotonic()):
            pass
        # the client asks s0 for some experts and s1 for others: one of the two hangs
        cluster.experts[1].hold()
        started = time.monotonic()
        out_TD = call(client, 1, *batch(8))
        took = time.monotonic() - started
        assert_right(1, batch(8), out_TD)
        # halfway to the deadline, where a first answer alone might have taken a minute
        assert 0.2 <= took < 5
        assert client.counters()["hedges_over_budget"] > 0
        # it is suspect now: nobody waits for it a second time
        before = client.counters()["hedges"]
        assert_right(3, batch(8), call(client, 3, *batch(8)))
        assert client.counters()["hedges"] == before
        cluster.experts[1].go.set()


# -- experts that nobody holds -----------------------------------------------------------------


def drops(cluster: Served, **options: Any) -> Client:
    """Return a client that does without experts that nobody holds."""
    return cluster.client(on_missing="drop", **options)


def dropped(layer: int, batched: tuple[Tensor, Tensor, Tensor], lost: set[int]) -> Tensor:
    """Return the oracle's sum without the lost experts, whose weights the others take over."""
    x_TD, ids_TK, weights_TK = batched
    left_TK = torch.tensor([[int(e) not in lost for e in row] for row in ids_TK])
    kept_TK = weights_TK * left_TK
    scale_T = weights_TK.sum(1, keepdim=True) / kept_TK.sum(1, keepdim=True)
    scale_T[~left_TK.any(1)] = 0
    return oracle(layer, x_TD, ids_TK, kept_TK * scale_T)


@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_dropped_experts_leave_their_weight_to_the_others_of_their_token(combine: str) -> None:
    with served(2, copies=1) as cluster:
        client = drops(cluster, combine=combine, recovery_timeout=50 * MS)
        call(client, 1, *batch(16))
        lost = set(cluster.servers[1].experts.holdings[1])
        cluster.servers[1].close()
        batched = batch(16)
        out_TD = call(client, 1, *batched)
        torch.testing.assert_close(out_TD.double(), dropped(1, batched, lost), rtol=1e-5, atol=1e-5)
        is_lost_TK = torch.tensor([[int(e) in lost for e in row] for row in batched[1]])
        counters = client.counters()
        assert counters["dropped_contributions"] == int(is_lost_TK.sum()) > 0
        assert counters["tokens_without_experts"] == int(is_lost_TK.all(1).sum()) > 0


def test_what_was_missed_once_is_not_waited_for_again_until_something_changes() -> None:
    with served(2, copies=1) as cluster:
        client = drops(cluster, recovery_timeout=300 * MS)
        call(client, 1, *batch(8))
        cluster.servers[1].close()
        call(client, 1, *batch(8))
        started = time.monotonic()
        for _ in range(5):
            call(client, 1, *batch(8))
        assert time.monotonic() - started < 0.3


def test_of_a_hung_server_only_the_experts_that_nobody_else_holds_are_dropped() -> None:
    # s0 holds all, s1 half: the other half of what s1 is asked for has no second holder
    everything = [(layer, expert) for layer in LAYERS for expert in range(E)]
    with served(2, copies=1) as cluster:
        shared = {expert for expert in range(E) if expert % 4 == 1}
        own = {int(e) for e in cluster.experts[1].inner.holdings[1]}
        assert shared < own
        cluster.experts[0].inner.update(
            {key: WEIGHTS[key] for key in everything if key[1] in shared}
        )
        client = drops(cluster, request_timeout=100 * MS, recovery_timeout=20 * MS)
        call(client, 1, *batch(16))
        cluster.experts[1].hold()
        batched = batch(16)
        out_TD = call(client, 1, *batched)
        cluster.experts[1].go.set()
        wanted_TD = dropped(1, batched, own - shared)
        torch.testing.assert_close(out_TD.double(), wanted_TD, rtol=1e-5, atol=1e-5)


def test_no_slot_is_lost_over_many_calls_and_failures() -> None:
    with served(2, copies=2) as cluster:
        client = cluster.client(hedge_after=5 * MS)
        for i in range(40):
            if i % 10 == 5:
                cluster.experts[i // 10 % 2].hold()
            assert_right(1, batch(40, i), call(client, 1, *batch(40, i)))
            for experts in cluster.experts:
                experts.go.set()
        deadline = time.monotonic() + 5
        conns = list(client._connections.live.values())
        while any(c.slots.num_given_up for c in conns) and time.monotonic() < deadline:
            for conn in conns:
                conn.reclaim()
            time.sleep(0.01)
        assert [c.slots.num_free for c in conns] == [4, 4]
