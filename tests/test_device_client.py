"""A client whose stages are kernels, called eagerly: right sums, failover by rows, its errors."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from tests.compiled import whole
from tests.device_served import (
    BRIEF,
    D,
    E,
    K,
    Stub,
    World,
    device_config,
    every_expert,
    inputs,
    moe_sum,
    world,
)
from tests.monitor.planned import wait_until
from tests.ops.processes import needs_x86
from torch_eaas import device_client_book
from torch_eaas.captured_step import CapturedStep
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.device_client import DeviceClient
from torch_eaas.errors import ConfigError, ExpertUnavailable, RequestRefused

pytestmark = needs_x86

EVERY = every_expert(1)
HALVES = (EVERY[:2], EVERY[2:])


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def call(client: DeviceClient, *routed: Tensor, add: Tensor | None = None) -> Tensor:
    """Dispatch to layer 0 and combine."""
    return client.combine(client.dispatch(0, *routed, num_experts=E), add)


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


# -- errors ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[World]:
    with world(EVERY) as servers:
        servers.client()
        yield servers


def bad(what: str, *, tokens: int = 2) -> dict[str, Any]:
    x_TD, ids_TK, weights_TK = inputs(tokens)
    good = {"x_TD": x_TD, "ids_TK": ids_TK, "weights_TK": weights_TK, "num_experts": E}
    changes: dict[str, dict[str, Any]] = {
        "width": {"x_TD": torch.zeros(2, D + 1)},
        "dtype": {"x_TD": x_TD.double()},
        "ids": {"ids_TK": ids_TK[:, :1]},
        "ids' dtype": {"ids_TK": ids_TK.float()},
        "experts": {"num_experts": E + 1},
        "device": {"x_TD": x_TD.to("meta")},
        "tokens": {},
    }
    return good | changes[what]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (bad("width"), "layer 0: hidden states must be (T, 8) in fp32, bf16 or fp16, got (2, 9)"),
        (bad("dtype"), "hidden states must be (T, 8) in fp32, bf16 or fp16, got (2, 8) in torch.f"),
        (bad("ids"), "layer 0: expert ids and weights must be (2, 2), got (2, 1) and (2, 2)"),
        (bad("ids' dtype"), "layer 0: expert ids must be int32 or int64, got torch.float32; cast"),
        (
            bad("tokens", tokens=5),
            "layer 0: 5 tokens are more than a slot of the device path holds;"
            " raise max_tokens (now 4), or split the batch",
        ),
        (bad("experts"), "layer 0 has 4 experts in this client's tables, got num_experts 5;"),
        (
            bad("device"),
            "layer 0: hidden states must be on the client's device cpu, got meta",
        ),
    ],
    ids=["width", "dtype", "ids", "ids' dtype", "tokens", "experts", "device"],
)
def test_what_does_not_fit_is_refused(served: World, given: dict[str, Any], message: str) -> None:
    [client] = served.clients
    call(client, *inputs())
    with pytest.raises(ConfigError, match=re.escape(message)):
        client.dispatch(0, **given)
    # and nothing is left under way
    assert torch.equal(call(client, *inputs()), moe_sum(*inputs()))


def test_a_second_dispatch_in_a_micro_batch_is_refused_and_so_is_a_micro_batch_too_many(
    served: World,
) -> None:
    [client] = served.clients
    ticket = client.dispatch(0, *inputs(), num_experts=E)
    with pytest.raises(
        ConfigError,
        match=r"micro-batch 0 has layer 0's dispatch under way; combine it first, or dispatch "
        r"within client.micro_batch\(i\) of another one",
    ):
        client.dispatch(0, *inputs(), num_experts=E)
    # one that is dropped is given up
    del ticket
    assert torch.equal(call(client, *inputs()), moe_sum(*inputs()))
    with (
        pytest.raises(
            ConfigError, match=r"micro_batch must be 0 to 2, got 3; raise max_micro_batches"
        ),
        client.micro_batch(3),
    ):
        pass


def test_what_cannot_be_captured_says_so(served: World, monkeypatch: pytest.MonkeyPatch) -> None:
    [client] = served.clients
    call(client, *inputs())
    monkeypatch.setattr(device_client_book, "_is_capturing", lambda device: True)
    with pytest.raises(
        ConfigError, match=r"layer 0: an eager dispatch waits for the device, which no capture"
    ):
        client.dispatch(0, *inputs(), num_experts=E)
    client.begin_step()
    try:
        with pytest.raises(
            ConfigError, match=r"layer 7 has no table yet.*; run the step once before it is capt"
        ):
            client.dispatch(7, *inputs(), num_experts=E)
    finally:
        client.end_step()


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"on_missing": "drop"}, {}, "on_missing='drop' is not on the device path: a graph cannot"),
        ({"detect_anomalies": True}, {}, "detect_anomalies is not on the device path: it reads"),
        ({}, {"device": "meta"}, "a client on meta needs a transport whose windows that device"),
        ({}, {"max_servers": 0}, "max_servers must be an integer of at least 1, got 0"),
        ({}, {"max_replicas": 0}, "max_replicas must be an integer of at least 1, got 0"),
        ({}, {"servers": []}, "a client takes either servers=[address, ...] or monitor=url"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_the_device_path_does_not_have_are_refused(
    options: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        DeviceClient(device_config(**options), **{"servers": ["unix:@nobody"], **more})


def test_a_closed_client_says_so() -> None:
    client = DeviceClient(
        device_config(), servers=["loopback:nobody"], transport=LoopbackTransport()
    )
    client.close()
    client.close()
    with pytest.raises(ConfigError, match=r"client client is closed; open one for this layer"):
        client.dispatch(0, *inputs(), num_experts=E)


def test_a_client_that_waits_to_be_ready_names_what_is_missing() -> None:
    with world(EVERY[:3]) as servers:
        client = servers.client()
        started = time.monotonic()
        with pytest.raises(ExpertUnavailable, match=r"layer 0, expert 3 is unavailable"):
            client.wait_ready([0], E, timeout=timedelta(milliseconds=50))
        assert time.monotonic() - started < 10
        client.wait_ready([0], 3)
