"""A step as one fixed list of launches: servers die, come and change under it; it stays right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import triton.language as tl
from torch import Tensor

from tests.device_served import (
    BRIEF,
    E,
    Stub,
    device_config,
    every_expert,
    inputs,
    world,
)
from tests.monitor.planned import wait_until
from tests.ops.host_end import SPEC
from tests.ops.implementations import use_kernels
from tests.ops.processes import host_end, needs_x86, told
from tests.protocol.record_traces import LAYERS, ScalingExperts
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.config import ServerConfig
from torch_eaas.device.captured_step import CapturedStep, check_repeatable
from torch_eaas.device.client import DeviceClient
from torch_eaas.errors import ConfigError, ExpertUnavailable, PeerTimeout, RequestRefused
from torch_eaas.ops import signal
from torch_eaas.server import ExpertServer

pytestmark = needs_x86


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=["twins", "kernels"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return as many layers as there is time for, and the one where a server hangs."""
    if request.param == "twins":
        return 60, 3
    use_kernels(monkeypatch)

    def clock_ns(has_timer: bool) -> tl.tensor:
        # the interpreter has no timer, and a count of looks is no time
        return tl.full((), time.monotonic_ns(), tl.int64)

    monkeypatch.setattr(signal, "clock_ns", clock_ns)
    return 3, 1


def assert_right(stub: Stub, out_TD: Tensor) -> None:
    """Check the output and what was kept, bit by bit."""
    expected_TD, kept_LTD = stub.expected()
    assert torch.equal(out_TD, expected_TD)
    assert torch.equal(stub.kept_LTD, kept_LTD)


def test_a_server_that_hangs_at_layer_3_costs_one_wait_and_the_replayed_step_is_the_undisturbed_one(
    layers: tuple[int, int],
) -> None:
    num_layers, hang_at = layers
    held = every_expert(num_layers)
    with world(held, held) as servers:
        client = servers.client(graph_wait=timedelta(seconds=0.5), max_servers=2)
        stub = Stub(client, range(num_layers))
        step = CapturedStep(client, stub)
        assert client.counters().get("failed_steps", 0) == 0
        hung = servers.experts[1]
        answers = hung.num_batches + hang_at
        # each layer asks both, so this is one for each layer before
        assert hung.num_batches == num_layers

        def hang() -> None:
            if hung.num_batches > answers:
                hung.go.clear()

        hung.on_batch = hang
        stub.kept_LTD.zero_()
        assert_right(stub, step.run())
        counters = client.counters()
        # one step failed, by one wait
        assert (counters["failed_steps"], counters["timeouts"]) == (1, 1)
        # and nothing was sent behind the layer that failed
        assert hung.num_batches == answers + 1


@pytest.fixture(scope="module")
def dying() -> Iterator[str]:
    """A server in a process that kills itself before the reply word of its step's layer 3."""
    # the first step asks it 60 times, and so does the second one
    with host_end("serve", 124) as process:
        yield told(process)


def test_a_server_process_that_is_killed_at_layer_3_costs_one_wait_and_no_bit(dying: str) -> None:
    layers = [LAYERS[i % 2] for i in range(60)]
    # its sums are not exact, so the mode has to be
    config = device_config(
        combine="exact", max_tokens=SPEC.max_tokens, graph_wait=timedelta(seconds=1)
    )
    experts = ScalingExperts(lambda: None)
    transport = SharedMemoryTransport()
    with (
        ExpertServer(experts, ServerConfig(name="stays"), transport=transport) as server,
        DeviceClient(config, servers=[dying, server.address], transport=transport) as client,
    ):
        server.serve_in_background()
        wait_until(lambda: len(client._connections.live) == 2)
        stub = Stub(client, layers)
        stub.weights_TK *= 2.0**-6
        step = CapturedStep(client, stub)
        expected_TD = step.run().clone()
        kept_LTD = stub.kept_LTD.clone()
        assert client.counters().get("failed_steps", 0) == 0
        stub.kept_LTD.zero_()
        started = time.monotonic()
        assert torch.equal(step.run(), expected_TD)
        assert torch.equal(stub.kept_LTD, kept_LTD)
        counters = client.counters()
        assert (counters["failed_steps"], counters["timeouts"]) == (1, 1)
        # sixty waits would take a minute
        assert time.monotonic() - started < 30


def test_placement_servers_and_tokens_change_under_one_captured_step() -> None:
    with world(every_expert(2), every_expert(2)) as servers:
        late = "unix:@torch-eaas-test-late-server"
        addresses = [*(server.address for server in servers.servers), late]
        client = servers.client(servers=addresses, graph_wait=timedelta(seconds=1))
        stub = Stub(client, range(2))
        step = CapturedStep(client, stub)
        assert_right(stub, step.run())

        # other inputs, and a smaller batch: the last row is of no expert
        stub.x_TD.mul_(3)
        stub.ids_TK[-1] = -1
        assert_right(stub, step.run())
        stub.ids_TK[0] = torch.tensor([E, 3])
        assert_right(stub, step.run())
        stub.ids_TK.fill_(-1)
        assert_right(stub, step.run())
        stub.ids_TK.copy_(torch.tensor([[0, 1], [2, 3], [3, 0]]))

        # a server gives up experts: it says so, and the newer placement is asked for
        servers.experts[0].hold([(0, 0), (1, 1)])
        assert_right(stub, step.run())
        wait_until(lambda: client.placement.servers[0].holdings == {0: (0,), 1: (1,)})
        failed = client.counters()["failed_steps"]
        assert client.counters()["refused_unknown_expert"] >= 1
        assert_right(stub, step.run())
        assert client.counters()["failed_steps"] == failed

        # a server is added, and alone has everything once the others are gone
        servers.add(every_expert(2), late)
        wait_until(lambda: len(client._connections.live) == 3, seconds=20)
        assert_right(stub, step.run())
        for server in servers.servers[:2]:
            server.close()
        assert_right(stub, step.run())
        assert servers.experts[2].num_batches > 0


def test_two_micro_batches_have_a_slot_each_and_one_abort_word() -> None:
    with world(every_expert(2), every_expert(2)) as servers:
        client = servers.client(graph_wait=timedelta(seconds=0.5))
        a, b = Stub(client, range(2)), Stub(client, range(2))
        b.x_TD.mul_(5)
        b.ids_TK.copy_((b.ids_TK + 1) % E)

        def interleaved() -> tuple[Tensor, Tensor]:
            xs = [a.x_TD, b.x_TD]
            for i in range(2):
                under_way = []
                for m, stub in enumerate((a, b)):
                    stub.kept_LTD[i] = xs[m]
                    with client.micro_batch(m):
                        under_way.append(stub.layers[i].dispatch(xs[m]))
                # the one that was sent last is combined first
                for m, stub in reversed(list(enumerate((a, b)))):
                    xs[m] = stub.layers[i].combine(under_way[m])
            return xs[0], xs[1]

        step = CapturedStep(client, interleaved)
        for stub, out_TD in zip((a, b), step.run(), strict=True):
            assert_right(stub, out_TD)
        servers.experts[0].stop()
        for stub, out_TD in zip((a, b), step.run(), strict=True):
            assert_right(stub, out_TD)
        assert client.counters()["failed_steps"] >= 1


def test_a_step_whose_experts_nobody_holds_waits_for_a_holder_and_then_says_whom_it_lacks() -> None:
    with world(every_expert(1)) as servers:
        client = servers.client(recovery_timeout=timedelta(milliseconds=200))
        stub = Stub(client, range(1))
        step = CapturedStep(client, stub)
        # neither of two replays in a row finds it
        servers.experts[0].hold([(0, 0), (0, 1), (0, 2)])
        client._connections.placement_is_stale = True
        wait_until(lambda: client.placement.servers[0].holdings == {0: (0, 1, 2)})
        started = time.monotonic()
        with pytest.raises(
            ExpertUnavailable, match=r"layer 0, expert 3 is unavailable \(no server holds it\)"
        ):
            step.run()
        assert 0.2 <= time.monotonic() - started < 10
        # somebody else's experts are there as before, and so is this one once it is held again
        servers.experts[0].hold(every_expert(1))
        client._connections.placement_is_stale = True
        wait_until(lambda: client.placement.servers[0].holdings == {0: (0, 1, 2, 3)})
        assert_right(stub, step.run())


def test_a_server_that_dies_alone_is_named_when_nobody_came_in_its_place() -> None:
    with world(every_expert(1)) as servers:
        client = servers.client(graph_wait=BRIEF, recovery_timeout=timedelta(milliseconds=200))
        step = CapturedStep(client, Stub(client, range(1)))
        step.run()
        servers.servers[0].close()
        with pytest.raises(
            ExpertUnavailable, match=r"layer 0, expert \d is unavailable \(.*s0.*\)"
        ):
            step.run()


def test_a_server_that_answers_nothing_fails_the_step_after_request_timeout() -> None:
    with world(every_expert(1)) as servers:
        client = servers.client(
            graph_wait=timedelta(milliseconds=50),
            first_request_timeout=timedelta(milliseconds=300),
        )
        servers.experts[0].stop()
        with pytest.raises(
            PeerTimeout,
            match=r"layer 0: client client waited 0.\d+ s after the first failure, tried s0: "
            r"client client had no answer from s0 within 0.05 s",
        ):
            CapturedStep(client, Stub(client, range(1)))


def test_a_server_whose_experts_raise_is_replaced_and_alone_refuses() -> None:
    def fail() -> None:
        raise RuntimeError("planned")

    with world(every_expert(1), every_expert(1)) as servers:
        client = servers.client()
        stub = Stub(client, range(1))
        step = CapturedStep(client, stub)
        servers.experts[0].on_batch = fail
        assert_right(stub, step.run())
        assert client.counters()["refused_internal"] == 1
        servers.experts[1].on_batch = fail
        with pytest.raises(RequestRefused, match=r"layer 0: server s\d refused: .*planned"):
            step.run()
        for experts in servers.experts:
            experts.on_batch = lambda: None
        assert_right(stub, step.run())


def test_an_id_beyond_the_experts_is_the_callers_mistake() -> None:
    with world(every_expert(1)) as servers:
        client = servers.client()
        stub = Stub(client, range(1))
        step = CapturedStep(client, stub)
        stub.ids_TK[1, 1] = E + 1
        with pytest.raises(
            ConfigError, match=r"layer 0: expert id 5 is not within 0 to 3 \(-1 and 4 mean no"
        ):
            step.run()


def test_a_step_that_is_not_repeatable_is_found_and_the_tensor_is_named() -> None:
    with world(every_expert(1)) as servers:
        client = servers.client()
        stub = Stub(client, range(1))
        step = CapturedStep(client, stub)
        check_repeatable(step, {"kv": stub.kept_LTD})
        position = torch.zeros(1)

        def advances() -> dict[str, Tensor]:
            position.add_(1)
            return {"logits": stub()}

        with pytest.raises(ConfigError, match=r"not repeatable: kept\['position'\] differs after"):
            check_repeatable(CapturedStep(client, advances), {"position": position})

        def counts() -> dict[str, Tensor]:
            position.add_(1)
            return {"logits": stub() + position}

        with pytest.raises(ConfigError, match=r"not repeatable: output\['logits'\] differs after"):
            check_repeatable(CapturedStep(client, counts), {})


def test_a_step_needs_a_run_before_it_is_captured() -> None:
    with world(every_expert(1)) as servers:
        client = servers.client()
        with pytest.raises(ConfigError, match=r"warmups must be at least 1, got 0: it makes the"):
            CapturedStep(client, Stub(client, range(1)), warmups=0)


def test_a_step_does_not_run_over_dispatches_that_are_under_way() -> None:
    with world(every_expert(1)) as servers:
        client = servers.client()
        stub = Stub(client, range(1))
        step = CapturedStep(client, stub)
        ticket = client.dispatch(0, *inputs(), num_experts=E)
        with pytest.raises(ConfigError, match=r"1 dispatches wait for their combine; a step needs"):
            step.run()
        client.combine(ticket)
        assert_right(stub, step.run())


@pytest.mark.parametrize(
    ("num_servers", "num_clients"), [(3, 1), (1, 4)], ids=["1 client : 3 servers", "4 : 1"]
)
def test_any_number_of_clients_and_servers_go_together(num_servers: int, num_clients: int) -> None:
    keys = every_expert(2)
    held = [[key for key in keys if key[1] % num_servers == i] for i in range(num_servers)]
    with world(*held) as servers:
        for _ in range(num_clients):
            client = servers.client()
            stub = Stub(client, range(2))
            stub.x_TD.mul_(1 + len(servers.clients))
            assert_right(stub, CapturedStep(client, stub).run())
        assert sum(len(server._control.pairs) for server in servers.servers) == (
            num_servers * num_clients
        )
