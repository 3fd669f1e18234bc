"""The server: merging, turns, errors that hurt only their sender, handshakes, draining."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.served import LAYERS, WEIGHTS, D, E, K, PlannedExperts, batch, call, oracle, pool, served
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.errors import ConfigError, ExpertUnavailable, HandshakeRefused
from torch_eaas.protocol.layout import REQUEST_HEADER, PairSpec
from torch_eaas.server import ExpertServer

MS = timedelta(milliseconds=1)


class ByHand:
    """One server that the test steps, and clients without threads."""

    def __init__(self, clock: Any = time.monotonic, **config: Any) -> None:
        self.transport = LoopbackTransport()
        self.experts = PlannedExperts(pool())
        self.server = ExpertServer(
            self.experts,
            ServerConfig(name="s", **config),
            transport=self.transport,
            clock=clock,
        )

    def client(self, **options: Any) -> Client:
        config = ClientConfig(hidden_size=D, top_k=K, **options)
        return Client(
            config, servers=[self.server.address], transport=self.transport, background=False
        )


def test_requests_of_two_clients_and_two_layers_run_as_one_batch() -> None:
    hand = ByHand()
    one, two = hand.client(), hand.client()
    first = one.dispatch(1, *batch(3, 1), num_experts=E)
    second = two.dispatch(3, *batch(5, 2), num_experts=E)
    assert hand.server.step() == 2
    assert hand.experts.batches == [8]
    for client, ticket, layer, inputs in (
        (one, first, 1, batch(3, 1)),
        (two, second, 3, batch(5, 2)),
    ):
        out = client.combine(ticket)
        torch.testing.assert_close(out.double(), oracle(layer, *inputs), rtol=1e-5, atol=1e-5)
    assert hand.server.counters()["requests"] == 2
    assert hand.server.step() == 0


def test_clients_take_turns_when_a_batch_is_full() -> None:
    hand = ByHand(max_rows=8 * K)
    greedy, modest = hand.client(), hand.client()
    tickets = [greedy.dispatch(1, *batch(4, i), num_experts=E) for i in range(3)]
    last = modest.dispatch(1, *batch(4, 9), num_experts=E)
    assert hand.server.step() == 2  # one of each, though the greedy one asked three times
    modest.combine(last)
    assert hand.server.step() == 2
    for ticket in tickets:
        greedy.combine(ticket)


def test_one_request_always_fits() -> None:
    hand = ByHand(max_rows=1)
    client = hand.client()
    ticket = client.dispatch(1, *batch(50), num_experts=E)
    assert hand.server.step() == 1
    client.combine(ticket)


def test_experts_that_fail_hurt_only_the_request_that_made_them_fail() -> None:
    with served(1) as cluster:
        good, bad = (
            cluster.client(name="good"),
            cluster.client(name="bad"),
        )
        call(bad, 1, *batch(2))
        cluster.experts[0].fail_with = ArithmeticError("planned")
        cluster.experts[0].hold()
        x, ids, w = batch(2)
        blocker = good.dispatch(1, *batch(2), num_experts=E)
        assert cluster.experts[0].entered.wait(5)
        poisoned = bad.dispatch(1, x * float("nan"), ids, w, num_experts=E)
        healthy = good.dispatch(1, *batch(2, 4), num_experts=E)
        cluster.experts[0].go.set()
        good.combine(blocker)
        out = good.combine(healthy)
        torch.testing.assert_close(out.double(), oracle(1, *batch(2, 4)), rtol=1e-5, atol=1e-5)
        with pytest.raises(ExpertUnavailable, match="ArithmeticError: planned"):
            bad.combine(poisoned)
        assert cluster.servers[0].counters()["refused_internal"] >= 1


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"instance": 7}, "stale"),
        ({"epoch": 99}, "stale"),
        ({"sequence": 5}, "stale"),
        ({"num_tokens": 0}, "bad_request"),
        ({"num_tokens": 4000}, "bad_request"),
        ({"flags": 1}, "bad_request"),
    ],
    ids=str,
)
def test_a_frame_that_is_off_is_answered_and_counted(fields: dict[str, int], name: str) -> None:
    hand = ByHand()
    client = hand.client()
    conn = client._connections.live["s"]
    ticket = client.dispatch(1, *batch(3), num_experts=E)
    offset = conn.spec.request_slot(0)
    header = list(REQUEST_HEADER.unpack_from(conn._requests, offset))
    names = [
        "instance", "epoch", "sequence", "placement_version", "budget_us", "layer", "num_tokens",
        "flags",
    ]  # fmt: skip
    for key, value in fields.items():
        header[names.index(key)] = value
    REQUEST_HEADER.pack_into(conn._requests, offset, *header)
    assert hand.server.step() == 1
    assert hand.server.counters()[f"refused_{name}"] == 1
    client._tickets.redeem(ticket).release()
    assert conn.reclaim() == 1
    ticket = client.dispatch(1, *batch(3), num_experts=E)
    hand.server.step()
    client.combine(ticket)


def test_a_request_whose_time_is_over_is_answered_without_computing() -> None:
    now = [100.0]
    hand = ByHand(clock=lambda: now[0])
    client = hand.client(request_timeout=1000 * MS, first_request_timeout=1000 * MS)
    hand.server.step()
    client.dispatch(1, *batch(3), num_experts=E)
    now[0] += 1.5  # the server was suspended: its last scan was before the request
    assert hand.server.step() == 1
    assert hand.server.counters() == {"refused": 1, "refused_expired": 1}
    assert hand.experts.batches == []


def test_experts_come_and_go_while_the_server_runs() -> None:
    with served(1) as cluster:
        client = cluster.client()
        inner = cluster.experts[0].inner
        inner.remove(1, 7)
        assert 7 not in cluster.servers[0].experts.holdings[1]
        inner.add(1, 7, WEIGHTS[1, 7])
        x, ids, w = batch(4)
        ids[:, 1] = 7
        out = call(client, 1, x, ids, w)
        torch.testing.assert_close(out.double(), oracle(1, x, ids, w), rtol=1e-5, atol=1e-5)


# -- handshakes ------------------------------------------------------------------------------------


def handshake(hand: ByHand, **changes: Any) -> dict[str, Any]:
    """Return the answer to a handshake that is right but for ``changes``."""
    spec = PairSpec(hidden_size=D, top_k=K, slots=2, max_tokens=4)
    window_bytes = changes.pop("window_bytes", spec.reply_bytes)
    spec_changes = changes.pop("spec", {})
    body = {
        "client": "c",
        "instance": f"{5:016x}",
        "epoch": 1,
        "protocol": 1,
        "fingerprint": "",
        "spec": {**spec.to_json(), **spec_changes},
        **changes,
    }
    link = hand.transport.dial(hand.server.address, 1)
    window = hand.transport.create_window(window_bytes)
    answer, windows = link.call("handshake", body, [window], timeout=1)
    assert [w.nbytes for w in windows] == [spec.request_bytes]
    return answer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol": 2}, "speaks protocol 2, this server 1"),
        ({"fingerprint": "other"}, "wants model other, server s has abcd:fp32"),
        ({"spec": {"hidden_size": 32}}, "hidden size 32, server s has 24"),
        ({"spec": {"slots": 0}}, "slots must be an integer of at least 1"),
        # as a peer refuses a format that came after it
        ({"spec": {"wire_dtype": "fp4"}}, "wire_dtype must be one of .*, got 'fp4'"),
        ({"spec": {"combine": "most"}}, "combine must be one of partial, exact"),
        ({"spec": {"extra": 1}}, "a pair's spec has the fields"),
        ({"spec": {"max_tokens": 1 << 20}}, "at most 64 slots of 65536 tokens"),
        ({"window_bytes": 4096}, "brings one reply window of"),
        ({"instance": "xyz"}, "not a handshake"),
        ({"epoch": None}, "not a handshake"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_handshake_that_does_not_fit_is_refused_with_the_reason(
    changes: dict[str, Any], message: str
) -> None:
    hand = ByHand(fingerprint="abcd:fp32")
    with pytest.raises(HandshakeRefused, match=message):
        handshake(hand, **changes)
    assert hand.server.num_clients == 0
    assert handshake(hand, epoch=2, fingerprint="abcd")["fingerprint"] == "abcd:fp32"
    assert handshake(hand, epoch=3, fingerprint="abcd:fp32")["name"] == "s"


def test_an_epoch_is_never_opened_twice_and_a_new_one_replaces_the_old() -> None:
    hand = ByHand()
    handshake(hand, epoch=4)
    for epoch in (4, 3):
        with pytest.raises(HandshakeRefused, match=f"epoch {epoch} is not above 4"):
            handshake(hand, epoch=epoch)
    handshake(hand, epoch=5)
    assert hand.server.num_clients == 1
    handshake(hand, epoch=1, instance=f"{6:016x}")
    assert hand.server.num_clients == 2


def test_one_client_more_than_a_server_takes_is_refused() -> None:
    hand = ByHand(max_pairs=1)
    handshake(hand)
    with pytest.raises(HandshakeRefused, match="has 1 clients already"):
        handshake(hand, instance=f"{6:016x}")


def test_control_calls_describe_health_metrics_and_unknown_verbs() -> None:
    hand = ByHand()
    client = hand.client()
    ticket = client.dispatch(1, *batch(3), num_experts=E)
    hand.server.step()
    client.combine(ticket)
    link = hand.transport.dial(hand.server.address, 1)
    described, _ = link.call("describe", {}, timeout=1)
    assert described["holdings"] == {str(layer): list(range(E)) for layer in LAYERS}
    assert link.call("health", {}, timeout=1)[0] == {"ok": True, "state": "serving"}
    text = link.call("metrics", {}, timeout=1)[0]["text"]
    assert "torch_eaas_server_requests_total 1.0" in text
    assert "torch_eaas_server_tokens_total 3.0" in text
    assert "torch_eaas_server_pairs 1.0" in text
    with pytest.raises(HandshakeRefused, match="no control verb 'fly'"):
        link.call("fly", {}, timeout=1)


def test_a_clients_end_frees_its_pair() -> None:
    hand = ByHand()
    client = hand.client()
    assert hand.server.num_clients == 1
    client.close()
    client.close()
    assert hand.server.num_clients == 0


def test_a_drain_serves_until_it_is_quiet_and_takes_no_new_client() -> None:
    hand = ByHand()
    client = hand.client()
    serving = threading.Thread(target=hand.server.serve)
    serving.start()
    link = hand.transport.dial(hand.server.address, 1)
    assert link.call("drain", {}, timeout=1)[0] == {"state": "draining"}
    out = call(client, 1, *batch(3))
    torch.testing.assert_close(out.double(), oracle(1, *batch(3)), rtol=1e-5, atol=1e-5)
    with pytest.raises(HandshakeRefused, match="server s is draining"):
        handshake(hand)
    serving.join(10)
    assert not serving.is_alive()


def test_a_drain_ends_after_its_timeout_though_clients_still_ask() -> None:
    hand = ByHand(drain_timeout=300 * MS)
    client = hand.client(recovery_timeout=200 * MS)
    serving = threading.Thread(target=hand.server.serve)
    serving.start()
    hand.server.drain()
    deadline = time.monotonic() + 10

    def ask_on() -> None:
        while time.monotonic() < deadline:
            call(client, 1, *batch(3))

    with pytest.raises(ExpertUnavailable):
        ask_on()
    serving.join(10)
    assert not serving.is_alive()


def test_a_server_serves_in_one_thread_only_and_closes_twice() -> None:
    server = ExpertServer(pool(), transport=LoopbackTransport())
    with server.serve_in_background():
        with pytest.raises(ConfigError, match="serves already"):
            server.serve_in_background()
        server.close()
    server.close()
