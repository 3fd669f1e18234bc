"""Double-batch overlap: the plain run's results, whatever the number of micro-batches."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.served import LAYERS, WEIGHTS, D, E, K, batch, call, oracle
from torch_eaas.client import Client
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.config import ClientConfig
from torch_eaas.dbo import DoubleBatchOverlap
from torch_eaas.errors import ConfigError, ExpertUnavailable, TurnTimeout
from torch_eaas.remote_moe import RemoteExperts, RemoteMoE
from torch_eaas.routers import GroupLimitedRouter
from torch_eaas.testing import Fault, FaultKind, FaultPlan, LocalCluster, Step

NEVER = timedelta(seconds=30)
SCALE = 2.5


class Router(GroupLimitedRouter):
    """A router whose row's bits do not depend on how many other rows there are."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [super(Router, self).forward(row_D[None]) for row_D in x_TD]
        return torch.cat([ids for ids, _ in pairs]), torch.cat([w for _, w in pairs])


def router() -> Router:
    torch.manual_seed(5)
    return Router(D, E, K, n_group=4, topk_group=2, routed_scaling_factor=SCALE)


class Model(nn.Module):
    """Two layers of remote experts, and in between what treats each row by itself."""

    def __init__(self, client: Client, router: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            RemoteMoE(
                router,
                RemoteExperts(client, layer=layer, num_experts=E, top_k=K),
                shared=nn.Tanh(),
            )
            for layer in LAYERS
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        for layer in self.layers:
            x_TD = torch.tanh(x_TD + layer(x_TD))
        return x_TD


@contextmanager
def cluster_and_client(**options: Any) -> Iterator[tuple[LocalCluster, Client]]:
    with LocalCluster(WEIGHTS, servers=2, copies=2) as cluster, torch.no_grad():
        yield cluster, cluster.client(top_k=K, **{"max_micro_batches": 5, **options})


# -- equality --------------------------------------------------------------------------------------


def expected(x_TD: Tensor, router: nn.Module) -> Tensor:
    """Return what the model computes, by the oracle; its weights have the factor once."""
    for layer in LAYERS:
        routed = oracle(layer, x_TD, *router(x_TD))
        x_TD = torch.tanh(x_TD.double() + routed + torch.tanh(x_TD.double())).float()
    return x_TD


@pytest.mark.parametrize("combine", ["exact", "partial"])
def test_outputs_are_the_plain_runs_for_every_number_of_micro_batches_and_rows(
    combine: str,
) -> None:
    with cluster_and_client(combine=combine, hedge_after=NEVER) as (_, client):
        model = Model(client, router())
        weights = model.layers[0].router(torch.randn(3, D))[1]
        torch.testing.assert_close(weights.sum(-1), torch.full((3,), SCALE))
        for rows in range(1, 18):
            x_TD = torch.randn(rows, D)
            plain_TD = model(x_TD)
            torch.testing.assert_close(plain_TD, expected(x_TD, model.layers[0].router))
            for count in range(1, 6):
                out_TD = DoubleBatchOverlap(client, num_micro_batches=count)(model, x_TD)
                if combine == "exact":
                    assert torch.equal(out_TD, plain_TD), (rows, count)
                else:
                    torch.testing.assert_close(out_TD, plain_TD, rtol=1e-5, atol=1e-5)


def test_processes_are_served_as_threads_are() -> None:
    transport = SharedMemoryTransport()
    with LocalCluster(WEIGHTS, servers=2, transport=transport) as cluster, torch.no_grad():
        client = cluster.client(top_k=K, combine="exact", hedge_after=NEVER)
        model = Model(client, router())
        x_TD = torch.randn(13, D)
        plain_TD = model(x_TD)
        for _ in range(5):
            assert torch.equal(
                DoubleBatchOverlap(client, num_micro_batches=3)(model, x_TD), plain_TD
            )


def test_micro_batches_larger_than_a_slot_do_not_wait_for_each_others_slots() -> None:
    with cluster_and_client(max_tokens=4, max_micro_batches=3, combine="exact") as (_, client):
        model = Model(client, router())
        x_TD = torch.randn(63, D)
        overlap = DoubleBatchOverlap(client, num_micro_batches=3)
        assert torch.equal(overlap(model, x_TD), model(x_TD))


def test_small_batches_run_plain_in_the_callers_thread() -> None:
    with cluster_and_client() as (_, client):
        threads = []

        def work(x_TD: Tensor) -> Tensor:
            threads.append(threading.current_thread())
            return x_TD

        overlap = DoubleBatchOverlap(client, num_micro_batches=2, min_rows=4)
        overlap(work, torch.randn(3, D))
        overlap(work, torch.randn(4, D))
        mine = threading.current_thread()
        assert [thread is mine for thread in threads] == [True, True, False]


def test_results_come_in_the_order_of_the_parts_though_they_end_in_another() -> None:
    with cluster_and_client() as (_, client):

        def work(times: int) -> int:
            for _ in range(times):
                call(client, 1, *batch(3, times))
            return times

        assert DoubleBatchOverlap(client).map(work, [9, 1, 5]) == [9, 1, 5]


# -- one at a time ---------------------------------------------------------------------------------


def test_another_computes_while_a_micro_batch_waits_and_never_two() -> None:
    with cluster_and_client(hedge_after=NEVER) as (cluster, client):
        entered, go = threading.Event(), threading.Event()
        run = cluster.servers[0].experts.run

        def held(*args: Any, **options: Any) -> Tensor:
            entered.set()
            assert go.wait(20)
            return run(*args, **options)

        cluster.servers[0].experts.run = held  # type: ignore[method-assign]
        order: list[str] = []

        def work(index: int) -> None:
            order.append(f"{index} computes")
            if index == 1:
                # the first one's tokens are at a server now, which has not answered
                assert entered.wait(20)
                go.set()
            call(client, 1, *batch(6, index))
            order.append(f"{index} goes on")

        DoubleBatchOverlap(client).map(work, [0, 1])
        assert order[:2] == ["0 computes", "1 computes"]
        assert sorted(order[2:]) == ["0 goes on", "1 goes on"]


def test_a_micro_batch_has_the_callers_state_of_torch() -> None:
    with cluster_and_client() as (_, client), torch.autocast("cpu", torch.bfloat16):

        def work(_: int) -> tuple[object, ...]:
            call(client, 1, *batch(3))
            return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

        assert DoubleBatchOverlap(client).map(work, [0, 1, 2]) == [(False, True)] * 3


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_server_that_dies_with_both_micro_batches_in_flight_costs_no_answer() -> None:
    # it is slow to read the first one's request, so that the second one's lies there too
    faults = [
        Fault(server=0, request=1, step=Step.WORD_SEEN, kind="delay", delay=timedelta(seconds=0.3)),
        Fault(server=0, request=1, step=Step.PAYLOAD_READ, kind="crash"),
    ]
    plan = FaultPlan(faults)
    with LocalCluster(WEIGHTS, servers=2, copies=2, plan=plan) as cluster, torch.no_grad():
        client = cluster.client(top_k=K, hedge_after=NEVER, combine="exact")
        x_TD = torch.randn(8, D)
        model = Model(client, router())
        out_TD = DoubleBatchOverlap(client)(model, x_TD)
        assert plan.fired == faults
        assert client.counters()["resends"] == 2
        assert torch.equal(out_TD, model(x_TD))
        torch.testing.assert_close(out_TD, expected(x_TD, model.layers[0].router))


@pytest.mark.parametrize("kind", ["crash", "drop", "bad", "delay", "duplicate", "suspend"])
def test_any_fault_under_overlap_costs_no_answer(kind: FaultKind) -> None:
    plan = FaultPlan([Fault(server=0, request=3, step=Step.COMPUTED, kind=kind)])
    with LocalCluster(WEIGHTS, servers=2, copies=2, plan=plan) as cluster, torch.no_grad():
        hedge_after = timedelta(milliseconds=80) if kind in ("drop", "suspend") else NEVER
        client = cluster.client(top_k=K, hedge_after=hedge_after, combine="exact")
        model = Model(client, router())
        x_TD = torch.randn(9, D)
        overlap = DoubleBatchOverlap(client, num_micro_batches=3)
        for _ in range(2):
            torch.testing.assert_close(overlap(model, x_TD), expected(x_TD, model.layers[0].router))
        assert len(plan.fired) == 1


def test_ctrl_c_while_all_wait_ends_the_run_at_once() -> None:
    with cluster_and_client(hedge_after=NEVER) as (cluster, client):
        plan = threading.Event()
        for server in cluster.servers:
            server.experts.run = lambda *_, **__: plan.wait(20)  # type: ignore[method-assign]

        def interrupt() -> None:
            deadline = time.monotonic() + 10
            while client.counters().get("dispatches", 0) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            DoubleBatchOverlap(client).map(lambda seed: call(client, 1, *batch(4, seed)), [1, 2])
        assert time.monotonic() - began < 5
        assert not [t for t in threading.enumerate() if t.name.startswith("eaas-micro")]
        plan.set()


class Planned(Exception):
    """What a test lets happen."""


@pytest.mark.parametrize("kind", [Planned, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_one_micro_batch_ends_all_and_keeps_its_traceback(
    failing: int, kind: type[BaseException]
) -> None:
    with cluster_and_client(max_micro_batches=3) as (_, client):
        overlap = DoubleBatchOverlap(client, num_micro_batches=3)
        error, ended = kind("planned"), []

        def work(index: int) -> None:
            try:
                for step in range(50):
                    ticket = client.dispatch(1, *batch(4, step), num_experts=E)
                    if index == failing and step == 3:
                        raise_planned(error)
                    client.combine(ticket)
            except BaseException as raised:
                ended.append((index, type(raised).__name__))
                raise

        with pytest.raises(kind, match="planned") as caught:
            overlap.map(work, [0, 1, 2])
        assert caught.value is error
        assert "raise_planned" in [entry.name for entry in caught.traceback]
        assert sorted(ended) == [
            (index, kind.__name__ if index == failing else "Ended") for index in range(3)
        ]
        # nothing is left of it: no thread, no dispatch, no slot
        assert not [t for t in threading.enumerate() if t.name.startswith("eaas-micro")]
        for _ in range(5):
            assert overlap.map(lambda seed: call(client, 1, *batch(4, seed)), [1, 2, 3])


def raise_planned(error: BaseException) -> None:
    raise error


def test_an_expert_without_holder_ends_all_with_its_own_error() -> None:
    with LocalCluster(WEIGHTS, servers=2) as cluster, torch.no_grad():
        client = cluster.client(top_k=K, recovery_timeout=timedelta(milliseconds=50))
        model = Model(client, router())
        overlap = DoubleBatchOverlap(client)
        overlap(model, torch.randn(4, D))
        cluster.kill(1)
        with pytest.raises(ExpertUnavailable, match=r"no server holds it|tried server-1"):
            overlap(model, torch.randn(4, D))


def test_a_micro_batch_that_computes_for_too_long_is_an_error() -> None:
    with cluster_and_client() as (_, client):
        gone = threading.Event()

        def work(index: int) -> None:
            if index == 1:
                gone.wait(0.5)
            call(client, 1, *batch(4, index))

        overlap = DoubleBatchOverlap(client, timeout=timedelta(milliseconds=50))
        with pytest.raises(TurnTimeout, match="waited for micro-batch 1, which has computed for"):
            overlap.map(work, [0, 1])
        gone.set()


def test_the_caller_waits_as_long_for_the_last_one() -> None:
    with cluster_and_client() as (_, client):
        gone = threading.Event()

        def work(index: int) -> None:
            call(client, 1, *batch(4, index))
            if index == 1:
                gone.wait(0.5)

        overlap = DoubleBatchOverlap(client, timeout=timedelta(milliseconds=50))
        with pytest.raises(TurnTimeout, match="waited for micro-batch 1"):
            overlap.map(work, [0, 1])
        gone.set()


def test_a_thread_that_cannot_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_and_client() as (_, client):
        start = threading.Thread.start

        def fails(self: threading.Thread) -> None:
            if self.name == "eaas-micro-batch-2":
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", fails)
        overlap = DoubleBatchOverlap(client)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            overlap.map(lambda seed: call(client, 1, *batch(4, seed)), [1, 2, 3])
        assert not [t for t in threading.enumerate() if t.name.startswith("eaas-micro")]
        assert len(overlap.map(lambda seed: call(client, 1, *batch(4, seed)), [1, 2])) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches must be an integer of at least 1, got 0"),
        ({"num_micro_batches": 6}, r"at most 5 and the client's max_micro_batches \(9\), got 6"),
        ({"min_rows": 0}, "min_rows must be an integer of at least 1, got 0"),
        ({"timeout": timedelta(0)}, "timeout must be a timedelta above zero"),
    ],
    ids=["none", "six", "rows", "timeout"],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with (
        cluster_and_client(max_micro_batches=9) as (_, client),
        pytest.raises(ConfigError, match=message),
    ):
        DoubleBatchOverlap(client, **options)


def test_more_micro_batches_than_slots_are_refused() -> None:
    with cluster_and_client(max_micro_batches=2) as (_, client):
        message = r"the client's max_micro_batches \(2\), got 3"
        with pytest.raises(ConfigError, match=message):
            DoubleBatchOverlap(client, num_micro_batches=3)
        with pytest.raises(ConfigError, match=message):
            DoubleBatchOverlap(client).map(lambda part: part, [1, 2, 3])


def test_a_micro_batch_is_not_split_again() -> None:
    with cluster_and_client() as (_, client):
        overlap = DoubleBatchOverlap(client)
        with pytest.raises(ConfigError, match="a micro-batch cannot be split again"):
            overlap(lambda x: overlap(lambda y: y, x), torch.randn(4, D))


def test_as_many_slots_as_micro_batches_and_one_more() -> None:
    assert ClientConfig(hidden_size=D, top_k=K, max_micro_batches=5).slots == 6
