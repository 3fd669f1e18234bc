"""The client: answers, splitting, failing over, deadlines."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.served import LAYERS, WEIGHTS, D, E, K, batch, call, oracle, pool, served
from torch_eaas.client import Client
from torch_eaas.client_pieces import Piece
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.errors import ConfigError, ExpertUnavailable, PeerTimeout, RequestRefused
from torch_eaas.server import ExpertServer

MS = timedelta(milliseconds=1)
TRANSPORTS = [LoopbackTransport, SharedMemoryTransport]


def assert_right(layer: int, batch_: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), oracle(layer, *batch_), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda t: t.__name__)
@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_every_batch_size_gives_the_oracles_sum(transport: type[Transport], combine: str) -> None:
    with served(3, copies=2, transport=transport()) as cluster:
        client = cluster.client(combine=combine)
        for num_tokens in (0, 1, 7, 15, 16, 17, 63, 160):
            x, ids, w = batch(num_tokens, num_tokens, low=-1)
            for layer in LAYERS:
                out = call(client, layer, x, ids, w)
                assert out.shape == (num_tokens, D)
                assert_right(layer, (x, ids, w), out)


def test_the_number_of_experts_means_no_expert_as_minus_one_does() -> None:
    with served(1) as cluster:
        client = cluster.client()
        x, ids, w = batch(5)
        ids[2] = torch.tensor([E, 3])
        ids[3] = torch.tensor([-1, E])
        out = call(client, 1, x, ids, w)
        assert_right(1, (x, ids, w), out)
        assert out[3].count_nonzero() == 0


def test_a_repeated_expert_counts_twice() -> None:
    with served(2) as cluster:
        x, ids, w = batch(3)
        ids[:] = 5
        assert_right(1, (x, ids, w), call(cluster.client(), 1, x, ids, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_outputs_dtype_is_the_inputs_and_layout_does_not_matter(dtype: torch.dtype) -> None:
    with served(2) as cluster:
        x, ids, w = batch(9)
        strided = torch.empty(D, 9, dtype=dtype).t().copy_(x)
        out = call(cluster.client(), 1, strided, ids, w.to(dtype))
        assert out.dtype == dtype
        expected = oracle(1, strided.float(), ids, w.to(dtype).float())
        bound = max(1e-5, torch.finfo(dtype).eps)
        torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)


def test_zero_tokens_and_tokens_without_experts_make_no_request() -> None:
    with served(1) as cluster:
        client = cluster.client()
        x, ids, w = batch(4)
        call(client, 1, x[:0], ids[:0], w[:0])
        assert call(client, 1, x, torch.full_like(ids, -1), w).count_nonzero() == 0
        assert client.counters().get("requests", 0) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, i, w: (x[:, 1:], i, w), r"layer 1: hidden states must be \(T, 24\)"),
        (lambda x, i, w: (x.double(), i, w), r"in fp32, bf16 or fp16, got .* torch.float64"),
        (lambda x, i, w: (x, i[1:], w), r"ids and weights must be \(4, 2\), got \(3, 2\)"),
        (lambda x, i, w: (x, i, w[:, :1]), r"ids and weights must be \(4, 2\)"),
        (lambda x, i, w: (x, i.clone().fill_(9), w), r"layer 1, token 0: expert id 9 is not"),
        (
            lambda x, i, w: (x, i.clone().fill_(-2), w),
            r"token 0: expert id -2 is not within 0 to 7",
        ),
        (lambda x, i, w: (x.to("meta"), i, w), r"must be on the CPU, got meta"),
    ],
    ids=["hidden", "dtype", "ids", "weights", "id-high", "id-low", "device"],
)
def test_bad_input_is_refused_before_anything_is_sent(change: object, message: str) -> None:
    with served(1) as cluster:
        client = cluster.client()
        x, ids, w = change(*batch(4))  # type: ignore[operator]
        with pytest.raises(ConfigError, match=message):
            client.dispatch(1, x, ids, w, num_experts=E)
        assert client.counters() == {}
        assert_right(1, batch(4), call(client, 1, *batch(4)))


def test_dispatches_may_be_combined_in_any_order_each_once() -> None:
    with served(2) as cluster:
        client = cluster.client()
        first = client.dispatch(1, *batch(3, 1), num_experts=E)
        second = client.dispatch(3, *batch(5, 2), num_experts=E)
        assert (first.dtype, first.shape) == (torch.int64, (1,))
        assert_right(3, batch(5, 2), client.combine(second))
        assert_right(1, batch(3, 1), client.combine(first))
        with pytest.raises(ConfigError, match="is not under way; combine takes each one once"):
            client.combine(first)


def test_one_dispatch_too_many_is_refused() -> None:
    with served(1) as cluster:
        client = cluster.client(max_micro_batches=2)
        tickets = [client.dispatch(1, *batch(3), num_experts=E) for _ in range(2)]
        with pytest.raises(ConfigError, match=r"raise max_micro_batches \(now 2\)"):
            client.dispatch(1, *batch(3), num_experts=E)
        for ticket in tickets:
            client.combine(ticket)


def test_a_split_batch_leaves_a_slot_for_the_other_micro_batches() -> None:
    with served(1) as cluster:
        client = cluster.client(max_micro_batches=3)
        cluster.experts[0].hold()
        big = client.dispatch(1, *batch(160, 1), num_experts=E)
        small = client.dispatch(1, *batch(3, 2), num_experts=E)
        requests = client.counters()["requests"]
        assert requests == 3  # two of the big batch, one of the small one
        cluster.experts[0].go.set()
        assert_right(1, batch(3, 2), client.combine(small))
        assert_right(1, batch(160, 1), client.combine(big))


def test_exact_mode_gives_equal_bits_for_every_placement_and_batch() -> None:
    x, ids, w = batch(37, low=-1)
    results = []
    for num_servers, copies in ((1, 1), (2, 1), (3, 2), (3, 3)):
        with served(num_servers, copies) as cluster:
            client = cluster.client(combine="exact")
            results.append(call(client, 1, x, ids, w))
            one_by_one = [
                call(client, 1, x[t : t + 1], ids[t : t + 1], w[t : t + 1]) for t in range(37)
            ]
            results.append(torch.cat(one_by_one))
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_partial_mode_gives_equal_bits_when_nothing_changes() -> None:
    with served(3, copies=2) as cluster:
        # a hedge on a busy machine would be a change
        client = cluster.client(hedge_after=timedelta(seconds=30))
        # one request a server: whether two of them share a batch is a matter of time
        outs = [call(client, 1, *batch(16)) for _ in range(5)]
        assert all(torch.equal(outs[0], out) for out in outs)


def test_the_added_tensor_enters_the_sum_in_fp32_before_the_cast() -> None:
    with served(1) as cluster:
        client = cluster.client()
        x, ids, w = batch(4)
        x = x.bfloat16()
        add = torch.randn(4, D)
        out = client.combine(client.dispatch(1, x, ids, w, num_experts=E), add=add)
        expected = (oracle(1, x.float(), ids, w) + add).bfloat16()
        torch.testing.assert_close(out, expected, rtol=0.008, atol=1e-6)


def test_a_bfloat16_wire_and_reply_cost_only_rounding() -> None:
    with served(2) as cluster:
        x, ids, w = batch(33)
        client = cluster.client(wire_dtype="bf16", reply_dtype="bf16")
        out = call(client, 1, x, ids, w)
        expected = oracle(1, x.bfloat16().float(), ids, w)
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


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
        assert client._connections.suspects == {"s1"}
        before = len(cluster.experts[1].batches)
        for _ in range(3):
            assert_right(3, batch(8), call(client, 3, *batch(8)))
        assert len(cluster.experts[1].batches) == before
        cluster.experts[1].go.set()
        deadline = time.monotonic() + 5
        while client._connections.suspects and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client._connections.suspects == set()
        assert_right(1, batch(8), call(client, 1, *batch(8)))
        assert len(cluster.experts[1].batches) > before


def test_a_late_server_without_a_replica_still_counts_when_it_answers() -> None:
    with served(2, copies=1) as cluster:
        client = cluster.client(hedge_after=10 * MS)
        cluster.experts[1].hold()
        threading.Timer(0.1, cluster.experts[1].go.set).start()
        assert_right(1, batch(8), call(client, 1, *batch(8)))
        assert client.counters().get("hedges", 0) == 0


def test_no_answer_in_time_names_who_waited_for_whom_which_layer_and_how_long() -> None:
    with served(2, copies=1) as cluster:
        client = cluster.client(request_timeout=60 * MS, name="asker")
        call(client, 1, *batch(8))
        cluster.experts[1].hold()
        message = r"client asker: layer 3: no answer from s1 within 0\.\d+ s \(asked: s1\)"
        with pytest.raises(PeerTimeout, match=message):
            call(client, 3, *batch(8))
        cluster.experts[1].go.set()
        assert_right(3, batch(8), call(client, 3, *batch(8)))


def test_a_window_of_which_no_slot_comes_back_is_replaced_and_late_writes_land_nowhere() -> None:
    with served(1) as cluster:
        client = cluster.client(request_timeout=40 * MS, max_micro_batches=1)
        call(client, 1, *batch(4))
        old = client._connections.live["s0"]
        cluster.experts[0].hold()
        for _ in range(2):
            with pytest.raises((PeerTimeout, ExpertUnavailable)):
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


def test_an_idle_client_delays_nobody() -> None:
    with served(2) as cluster:
        busy, idle = cluster.client(name="busy"), cluster.client(name="idle")
        ticket = idle.dispatch(1, *batch(4), num_experts=E)  # dispatched and not combined
        for i in range(200):
            call(busy, 1, *batch(4, i))
        assert_right(1, batch(4), idle.combine(ticket))
        assert busy.counters().get("hedges", 0) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"either servers=\[address, ...\] or monitor=url"),
        ({"servers": ["loopback:x"], "monitor": "http://127.0.0.1:1"}, "either servers"),
    ],
    ids=["neither", "both"],
)
def test_a_client_is_told_of_servers_in_one_way(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Client(ClientConfig(hidden_size=D, top_k=K), transport=LoopbackTransport(), **options)  # type: ignore[arg-type]


def test_waiting_for_servers_that_are_not_there_names_what_is_missing() -> None:
    with (
        Client(
            ClientConfig(hidden_size=D, top_k=K),
            servers=["loopback:nobody"],
            transport=LoopbackTransport(),
        ) as client,
        pytest.raises(ExpertUnavailable, match=r"layer 1, expert 0 .*no server is known yet"),
    ):
        client.wait_ready(LAYERS, E, timeout=50 * MS)
