"""A client whose stages are kernels, called eagerly: right sums, failover by rows, its errors."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from typing_extensions import override

from tests.compiled import whole
from tests.device_served import (
    BRIEF,
    D,
    E,
    K,
    Stub,
    call,
    every_expert,
    inputs,
    moe_sum,
    world,
)
from tests.monitor.planned import wait_until
from tests.ops.processes import needs_x86
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.device.captured_step import CapturedStep
from torch_eaas.errors import ExpertUnavailable, RequestRefused

pytestmark = needs_x86

EVERY = every_expert(1)
HALVES = (EVERY[:2], EVERY[2:])


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("combine", ["partial", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_a_call_is_the_local_sum_in_the_callers_dtype(
    num_tokens: int, ids_dtype: torch.dtype, dtype: torch.dtype, combine: str
) -> None:
    with world(*HALVES) as servers:
        client = servers.client(combine=combine)
        x_TD, ids_TK, weights_TK = inputs(num_tokens)
        if num_tokens == 4:
            # both ways to say none, and a token that nobody is asked for
            ids_TK[0] = torch.tensor([E, 1])
            ids_TK[2] = torch.tensor([-1, E])
        x_TD = x_TD.to(dtype)
        add_TD = torch.full((num_tokens, D), 0.5)
        expected_TD = moe_sum(x_TD, ids_TK, weights_TK)
        out_TD = call(client, x_TD, ids_TK.to(ids_dtype), weights_TK)
        assert out_TD.dtype == dtype
        assert torch.equal(out_TD, expected_TD.to(dtype))
        out_TD = call(client, x_TD, ids_TK.to(ids_dtype), weights_TK.double(), add=add_TD)
        assert torch.equal(out_TD, (expected_TD + add_TD).to(dtype))


def test_what_is_narrow_on_the_wire_and_in_replies_is_rounded_there_alone() -> None:
    with world(EVERY) as servers:
        client = servers.client(wire_dtype="bf16", reply_dtype="bf16")
        x_TD, ids_TK, weights_TK = inputs(2)
        # 1 + 2**-9 is not a bf16 number
        x_TD = torch.full((2, D), 1 + 2.0**-9)
        expected_TD = moe_sum(torch.ones(2, D), ids_TK, weights_TK)
        assert torch.equal(call(client, x_TD, ids_TK, weights_TK), expected_TD)


def test_zero_tokens_make_no_request() -> None:
    with world(EVERY) as servers:
        client = servers.client()
        assert call(client, *inputs(0)).shape == (0, D)
        assert servers.experts[0].num_batches == 0


def test_each_dispatch_wakes_servers_that_are_threads_of_this_process() -> None:
    rung_by: list[str] = []

    class Bell(LoopbackTransport):
        @override
        def ring(self) -> None:
            rung_by.append(threading.current_thread().name)
            super().ring()

    with world(*HALVES, transport=Bell()) as servers:
        client = servers.client()
        me = threading.current_thread().name
        before = rung_by.count(me)
        for _ in range(3):
            assert torch.equal(call(client, *inputs()), moe_sum(*inputs()))
        assert rung_by.count(me) == before + 3


def test_each_micro_batch_has_one_dispatch_under_way_and_they_end_in_any_order() -> None:
    with world(EVERY) as servers:
        client = servers.client()
        x_TD, ids_TK, weights_TK = inputs()
        tickets = []
        for m in range(3):
            with client.micro_batch(m):
                tickets.append(
                    client.dispatch(0, x_TD * (m + 1), ids_TK, weights_TK, num_experts=E)
                )
        for m in (1, 2, 0):
            expected_TD = moe_sum(x_TD * (m + 1), ids_TK, weights_TK)
            assert torch.equal(client.combine(tickets[m]), expected_TD)


# -- failover --------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_eagerly_a_hung_servers_rows_alone_are_asked_for_again_in_partial_mode(
    combine: str,
) -> None:
    # expert 0 is on the first server, expert 3 on the second, the others on both
    with world(EVERY[:3], EVERY[1:], EVERY) as servers:
        client = servers.client(combine=combine, graph_wait=BRIEF, max_replicas=3)
        routed = inputs()
        expected_TD = moe_sum(*routed)
        for _ in range(2):
            assert torch.equal(call(client, *routed), expected_TD)
        asked = [experts.num_batches for experts in servers.experts]
        hung = max(range(3), key=lambda i: asked[i])
        servers.experts[hung].stop()
        assert torch.equal(call(client, *routed), expected_TD)
        assert client.counters()["timeouts"] == 1
        # its window is left, its late answer harms nobody, and the next handshake brings it back
        servers.experts[hung].go.set()
        wait_until(lambda: len(client._connections.live) == 3)
        wait_until(lambda: not client._connections.left)
        for _ in range(4):
            assert torch.equal(call(client, *routed), expected_TD)
        assert client.counters()["timeouts"] == 1


def test_what_has_been_answered_is_not_asked_for_again_in_partial_mode() -> None:
    # experts 2 and 3 have two holders, which get one of them each
    with world(*HALVES, EVERY[2:]) as servers:
        client = servers.client(graph_wait=BRIEF)
        routed = inputs()
        call(client, *routed)
        before = [experts.num_batches for experts in servers.experts]
        assert before == [1, 1, 1]
        servers.experts[1].stop()
        add_TD = torch.ones(3, D)
        assert torch.equal(call(client, *routed, add=add_TD), moe_sum(*routed) + add_TD)
        # the third one is asked for its own expert, and then for the hung one's alone
        assert [experts.num_batches for experts in servers.experts] == [2, 2, 3]


def test_in_exact_mode_the_bits_do_not_depend_on_a_failure() -> None:
    made = torch.Generator().manual_seed(0)
    x_TD = torch.randn(4, D, generator=made)
    weights_TK = torch.rand(4, K, generator=made)
    _, ids_TK, _ = inputs(4)
    with world(EVERY, EVERY) as servers:
        client = servers.client(combine="exact", graph_wait=BRIEF)
        expected_TD = call(client, x_TD, ids_TK, weights_TK)
        servers.experts[1].stop()
        assert torch.equal(call(client, x_TD, ids_TK, weights_TK), expected_TD)
        assert client.counters()["timeouts"] == 1


def test_a_server_that_leaves_is_suspect_and_asked_no_more_while_others_hold_its_experts() -> None:
    with world(EVERY, EVERY) as servers:
        client = servers.client()
        routed = inputs()
        call(client, *routed)
        servers.servers[0]._path._runner.draining = True
        for _ in range(3):
            assert torch.equal(call(client, *routed), moe_sum(*routed))
        assert client.counters()["refused_draining"] == 1
        assert client._connections.suspects == ["s0"]


def test_a_request_that_a_server_finds_too_old_is_sent_again() -> None:
    with world(EVERY) as servers:
        client = servers.client(graph_wait=BRIEF)
        routed = inputs()
        call(client, *routed)
        # as if it had been suspended: its last look at the slot is longer ago than the budget
        with servers.servers[0]._path._writing:
            time.sleep(1.5 * BRIEF.total_seconds())
            ticket = client.dispatch(0, *routed, num_experts=E)
        assert torch.equal(client.combine(ticket), moe_sum(*routed))
        counters = client.counters()
        assert (counters["refused_expired"], counters.get("timeouts", 0)) == (1, 0)


def test_an_answer_of_another_window_is_not_looked_at() -> None:
    with world(EVERY, EVERY) as servers:
        client = servers.client()
        routed = inputs()
        call(client, *routed)
        [pair] = servers.servers[0]._control.pairs
        pair.epoch += 1
        assert torch.equal(call(client, *routed), moe_sum(*routed))
        assert client.counters()["stale"] == 1
        # the next window is as good as any
        wait_until(lambda: len(client._connections.live) == 2)
        assert torch.equal(call(client, *routed), moe_sum(*routed))


def test_eagerly_an_expert_that_nobody_holds_is_waited_for_and_named() -> None:
    with world(EVERY[:3]) as servers:
        client = servers.client(recovery_timeout=timedelta(milliseconds=100))
        with pytest.raises(ExpertUnavailable, match=r"layer 0, expert 3 is unavailable"):
            call(client, *inputs())
        # the next call is as good as ever
        x_TD, ids_TK, weights_TK = inputs()
        ids_TK[ids_TK == 3] = 2
        assert torch.equal(
            call(client, x_TD, ids_TK, weights_TK), moe_sum(x_TD, ids_TK, weights_TK)
        )


def test_a_request_that_a_server_finds_malformed_is_refused_with_its_text() -> None:
    with world(EVERY) as servers:
        client = servers.client()
        call(client, *inputs())
        # a server that takes fewer tokens than was agreed
        [pair] = servers.servers[0]._control.pairs
        pair.spec = dataclasses.replace(pair.spec, max_tokens=2)
        with pytest.raises(RequestRefused, match=r"layer 0: server s0 refused: .*1 to 2 tokens.*3"):
            call(client, *inputs())


@pytest.mark.parametrize("first", [0, 1], ids=["in order", "last first"])
def test_a_failover_of_one_micro_batch_leaves_anothers_windows_alone(first: int) -> None:
    with world(EVERY, EVERY, EVERY) as servers:
        # two rows: the third server takes the row of one that has gone
        client = servers.client(graph_wait=BRIEF, max_servers=2)
        x_TD, ids_TK, weights_TK = inputs()
        call(client, x_TD, ids_TK, weights_TK)
        servers.experts[1].stop()
        tickets = []
        for m in range(2):
            with client.micro_batch(m):
                tickets.append(
                    client.dispatch(0, x_TD * (m + 1), ids_TK, weights_TK, num_experts=E)
                )
        for m in (first, 1 - first):
            expected_TD = moe_sum(x_TD * (m + 1), ids_TK, weights_TK)
            # while the other one may still look into the hung server's window, its row stays
            assert servers.experts[2].num_batches == 0
            assert torch.equal(client.combine(tickets[m]), expected_TD)
        call(client, x_TD, ids_TK, weights_TK)
        assert servers.experts[2].num_batches > 0


@pytest.mark.parametrize("max_replicas", [1, 2])
def test_answers_are_added_as_they_were_asked_for_though_the_tables_have_changed(
    max_replicas: int,
) -> None:
    with world(EVERY, EVERY) as servers:
        client = servers.client(combine="exact", max_replicas=max_replicas)
        x_TD, ids_TK, weights_TK = inputs()
        ticket = client.dispatch(0, x_TD, ids_TK, weights_TK, num_experts=E)
        for experts in servers.experts:
            wait_until(lambda experts=experts: experts.num_batches == 1)
        # by the next dispatch everything is the other server's
        [pair] = servers.servers[1]._control.pairs
        wait_until(lambda: pair._reply_words[0] == 0x102)
        servers.servers[1].close()
        wait_until(lambda: len(client._connections.live) == 1)
        with client.micro_batch(1):
            assert torch.equal(call(client, *inputs()), moe_sum(*inputs()))
        assert torch.equal(client.combine(ticket), moe_sum(x_TD, ids_TK, weights_TK))


# -- rows of the table -----------------------------------------------------------------------------


def test_a_client_uses_as_many_servers_as_it_has_rows_and_says_what_to_raise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with world(EVERY, EVERY, EVERY) as servers:
        client = servers.client(max_servers=2)
        routed = inputs()
        assert torch.equal(call(client, *routed), moe_sum(*routed))
        assert "no row is left for s2; raise max_servers (now 2)" in caplog.text
        # a row becomes free, and another server takes it
        servers.servers[0].close()
        wait_until(lambda: "s0" not in client._connections.live)
        servers.servers[1].close()
        wait_until(lambda: "s1" not in client._connections.live)
        assert torch.equal(call(client, *routed), moe_sum(*routed))
        assert servers.experts[2].num_batches == 1


def test_nothing_is_written_while_nothing_changes() -> None:
    with world(EVERY) as servers:
        client = servers.client()
        call(client, *inputs())
        pairs, version = client._tables._pairs, client._tables.version
        counts = pairs.on_device._version, version._version
        for _ in range(3):
            client.refresh()
            call(client, *inputs())
        assert (pairs.on_device._version, version._version) == counts


# -- under a compiler ------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_layer_compiles_whole_over_a_device_client_and_is_captured_so() -> None:
    with world(EVERY, EVERY) as servers:
        client = servers.client()
        stub = Stub(client, [0])
        compiled, _ = whole(stub.layers[0])
        x_TD, _ = stub.expected()
        assert torch.equal(compiled(stub.x_TD), x_TD)
        step = CapturedStep(client, lambda: compiled(stub.x_TD))
        dispatches = client.counters()["dispatches"]
        assert torch.equal(step.run(), x_TD)
        assert client.counters()["dispatches"] == dispatches + 1
