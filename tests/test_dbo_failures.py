"""Double-batch overlap, when a server, a micro-batch or the user ends something."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from tests.overlapping import NEVER, Model, cluster_and_client, expected, router
from tests.served import WEIGHTS, D, E, K, batch, call
from torch_eaas.dbo import DoubleBatchOverlap
from torch_eaas.errors import ExpertUnavailable, TurnTimeout
from torch_eaas.testing import Fault, FaultKind, FaultPlan, LocalCluster, Step


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


@pytest.fixture
def may_be_interrupted() -> Iterator[None]:
    """Give SIGINT its usual meaning, also where a shell's ``&`` makes its children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("may_be_interrupted")
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
        error, ended, begun = kind("planned"), [], set()

        def work(index: int) -> None:
            begun.add(index)
            try:
                for step in range(500):
                    ticket = client.dispatch(1, *batch(4, step), num_experts=E)
                    # one whose answers are always there keeps the turn: others may begin late
                    if index == failing and step >= 3 and len(begun) == 3:
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
