"""Every kind of fault at every step of the protocol: right answers, no slot lost, all counted."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, get_args

import pytest
import torch

from tests.served import LAYERS, WEIGHTS, K, batch, call, oracle
from torch_eaas.client import Client
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.errors import ConfigError, ExpertUnavailable
from torch_eaas.testing import Fault, FaultKind, FaultPlan, LocalCluster, Step

MS = timedelta(milliseconds=1)
NEVER = timedelta(seconds=30)
SILENT = ("drop", "suspend")
"""Kinds that only a clock can notice."""

KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
EACH_STEP = pytest.mark.parametrize("step", Step, ids=lambda step: step.name.lower())


def planned(step: Step, kind: FaultKind, **fault: Any) -> Fault:
    delay = {"suspend": 400 * MS, "delay": 5 * MS}.get(kind, MS)
    return Fault(**{"server": 0, "request": 2, "step": step, "kind": kind, "delay": delay, **fault})


def client_of(cluster: LocalCluster, kind: FaultKind, **options: Any) -> Client:
    """Return a client that hedges where nothing else can notice the fault, and not by chance."""
    hedge_after = 80 * MS if kind in SILENT else NEVER
    # a quiet server's window is replaced after this time
    return cluster.client(
        top_k=K, hedge_after=hedge_after, request_timeout=1000 * MS, max_micro_batches=1, **options
    )


def assert_right(client: Client, seed: int) -> None:
    layer = LAYERS[seed % 2]
    inputs = batch(6, seed)
    out = call(client, layer, *inputs)
    torch.testing.assert_close(out.double(), oracle(layer, *inputs), rtol=1e-5, atol=1e-5)


def assert_no_slot_lost(client: Client, alive: set[str]) -> None:
    """Wait until these servers' slots are all free: the late answer came, or a new window did."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        live = client._connections.live
        for conn in live.values():
            conn.reclaim()
        free = all(conn.slots.num_free == conn.spec.slots for conn in live.values())
        if free and set(live) == alive:
            return
        time.sleep(0.01)
    pytest.fail(f"slots given up: {[(c.name, c.slots.num_given_up) for c in live.values()]}")


def happened(client: Client) -> dict[str, int]:
    """Return what the client counted of failures, without zeros."""
    names = ("hedges", "resends", "stale", "timeouts", "refused_internal")
    counted = client.counters()
    return {name: counted[name] for name in names if counted.get(name)}


def expected(step: Step, kind: FaultKind) -> dict[str, int]:
    """Return what the client has to count where the other server answers instead."""
    if kind in ("delay", "duplicate") or step is Step.WORD_WRITTEN:
        return {}
    if kind == "crash":
        return {"resends": 1}
    written = step in (Step.PAYLOAD_WRITTEN, Step.HEADER_WRITTEN)
    return {"stale" if written else "refused_internal": 1, "resends": 1}


@EACH_KIND
@EACH_STEP
def test_where_another_holds_the_experts_a_fault_costs_no_answer_and_no_slot(
    step: Step, kind: FaultKind
) -> None:
    fault = planned(step, kind)
    plan = FaultPlan([fault])
    with LocalCluster(WEIGHTS, servers=2, copies=2, plan=plan) as cluster:
        client = client_of(cluster, kind)
        seed = 0
        while not plan.fired:
            assert_right(client, seed)
            seed += 1
            assert seed < 50, "the planned request never came"
        assert plan.fired == [fault]
        counted = happened(client)
        if kind == "bad" and step is Step.WORD_WRITTEN:
            # the answer was right when its word came: whether it was read by then is chance
            assert set(counted) <= {"stale", "resends"}
        elif kind in SILENT:
            # a busy machine makes the client hedge more than once
            assert set(counted) <= {"hedges"}
            assert counted or step is Step.WORD_WRITTEN
        else:
            assert counted == expected(step, kind)
        plan.end()
        for more in range(seed, seed + 6):
            assert_right(client, more)
        alive = {"server-1"} if kind == "crash" else {"server-0", "server-1"}
        assert_no_slot_lost(client, alive)


@EACH_KIND
@EACH_STEP
def test_a_sole_holders_fault_gives_the_right_answer_or_a_typed_error_in_time(
    step: Step, kind: FaultKind
) -> None:
    plan = FaultPlan([planned(step, kind)])
    with LocalCluster(WEIGHTS, servers=1, plan=plan) as cluster:
        client = client_of(cluster, kind, recovery_timeout=100 * MS)
        assert_right(client, 0)
        started = time.monotonic()
        told = ""
        try:
            assert_right(client, 1)
        except ExpertUnavailable as error:
            told = str(error)
        assert not told or ("layer 3" in told and kind in ("crash", "drop", "bad"))
        assert time.monotonic() - started < 3
        assert len(plan.fired) == 1
        plan.end()
        if kind != "crash":
            for seed in range(2, 8):
                assert_right(client, seed)


@EACH_STEP
def test_a_crash_over_shared_memory_costs_no_answer(step: Step) -> None:
    plan = FaultPlan([planned(step, "crash")])
    transport = SharedMemoryTransport()
    with LocalCluster(WEIGHTS, servers=2, copies=2, transport=transport, plan=plan) as cluster:
        client = client_of(cluster, "crash")
        for seed in range(8):
            assert_right(client, seed)
        assert len(plan.fired) == 1
        assert_no_slot_lost(client, {"server-1"})


def test_a_slot_whose_answer_never_comes_returns_while_other_requests_are_answered() -> None:
    plan = FaultPlan([planned(Step.COMPUTED, "drop")])
    with LocalCluster(WEIGHTS, servers=1, plan=plan) as cluster:
        client = cluster.client(top_k=K, request_timeout=300 * MS, recovery_timeout=50 * MS)
        assert_right(client, 0)
        with pytest.raises(ExpertUnavailable, match="no answer from server-0"):
            assert_right(client, 1)
        end = time.monotonic() + 10
        while _given_up(client) and time.monotonic() < end:
            assert_right(client, 2)
            time.sleep(0.02)
        assert _given_up(client) == 0


def _given_up(client: Client) -> int:
    return sum(conn.slots.num_given_up for conn in client._connections.live.values())


def test_faults_happen_where_and_when_they_were_planned() -> None:
    plan = FaultPlan(
        [
            planned(Step.COMPUTED, "bad", server=0, request=1),
            planned(Step.WORD_SEEN, "bad", server=1, request=2),
            planned(Step.WORD_SEEN, "bad", server=1, request=1000),
        ]
    )
    with LocalCluster(WEIGHTS, servers=2, copies=1, plan=plan) as cluster:
        client = cluster.client(top_k=K, hedge_after=NEVER, recovery_timeout=50 * MS)
        for seed in range(2):
            with pytest.raises(ExpertUnavailable, match="a planned fault"):
                assert_right(client, seed)
        assert_right(client, 2)
        assert [(fault.server, fault.request) for fault in plan.fired] == [(0, 1), (1, 2)]
        assert (plan.requests(0), plan.requests(1)) == (3, 3)


def test_nobody_opens_a_pair_to_a_suspended_server() -> None:
    plan = FaultPlan([planned(Step.COMPUTED, "suspend", request=1, delay=NEVER)])
    with LocalCluster(WEIGHTS, servers=2, copies=2, plan=plan) as cluster:
        client = client_of(cluster, "suspend")
        while not plan.fired:
            assert_right(client, 0)
        late = cluster.client(top_k=K, name="late")
        time.sleep(0.05)
        assert set(late._connections.live) == {"server-1"}
        plan.end()
        deadline = time.monotonic() + 5
        while len(late._connections.live) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert set(late._connections.live) == {"server-0", "server-1"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"server": -1}, "server must be an integer of at least 0, got -1"),
        ({"request": 0}, "request must be an integer of at least 1, got 0"),
        ({"kind": "explode"}, "kind must be one of crash, .*, bad, got 'explode'"),
        ({"delay": 0 * MS}, "delay must be a timedelta above zero"),
    ],
    ids=["server", "request", "kind", "delay"],
)
def test_a_fault_that_cannot_happen_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fault(**{"server": 0, "request": 1, "step": Step.COMPUTED, "kind": "drop", **change})


def test_two_faults_in_one_place_are_refused() -> None:
    faults = [planned(Step.COMPUTED, kind) for kind in ("drop", "crash")]
    with pytest.raises(ConfigError, match="one fault for each server, request and step, got 2"):
        FaultPlan(faults)
