"""Clients that the monitor no longer hears: servers look at them seldom, until they ask again."""

from __future__ import annotations

import torch

from tests.monitor.planned import FAST, LEASE, Cluster, client, server, wait_until
from tests.served import WEIGHTS, E, K, batch, call, oracle
from tests.test_server import ByHand
from torch_eaas.server_pairs import SLOW_SCAN_S
from torch_eaas.testing import LocalCluster


def test_a_silent_client_is_scanned_slowly_and_a_request_brings_it_back_at_once() -> None:
    now = [100.0]
    hand = ByHand(clock=lambda: now[0])
    silent, other = hand.client(), hand.client()
    hear, told = hand.server._control.hear_silent, frozenset([silent.instance])
    hear(told)
    assert hand.server.step() == 0
    first = silent.dispatch(1, *batch(3, 1), num_experts=E)
    now[0] += 0.9 * SLOW_SCAN_S
    assert hand.server.step() == 0
    ticket = other.dispatch(1, *batch(4, 2), num_experts=E)
    assert hand.server.step() == 1
    other.combine(ticket)
    now[0] += 0.2 * SLOW_SCAN_S
    assert hand.server.step() == 1
    out = silent.combine(first)
    torch.testing.assert_close(out.double(), oracle(1, *batch(3, 1)), rtol=1e-5, atol=1e-5)
    # it is still told to be silent, but it has asked since
    hear(told)
    for seed in range(3):
        ticket = silent.dispatch(1, *batch(3, seed), num_experts=E)
        assert hand.server.step() == 1
        silent.combine(ticket)
    # it was heard, and has fallen silent once more
    hear(frozenset())
    hear(told)
    assert hand.server.step() == 0
    silent.dispatch(1, *batch(3), num_experts=E)
    assert hand.server.step() == 0


def test_servers_are_told_of_a_client_from_the_end_of_its_lease_for_ten_leases() -> None:
    cluster = Cluster(start=0)
    cluster.join(server("s", 1))
    cluster.join(client("c", 2))
    cluster.pass_time(LEASE, beating=(1,))
    assert cluster.members.silent_clients == []
    cluster.pass_time(0.5, beating=(1,))
    assert cluster.members.silent_clients == [2]
    cluster.pass_time(8 * LEASE, beating=(1,))
    assert cluster.members.silent_clients == [2]
    cluster.pass_time(2 * LEASE, beating=(1,))
    assert cluster.members.silent_clients == []


def test_a_client_that_joins_again_or_leaves_is_silent_no_more() -> None:
    cluster = Cluster(start=0)
    cluster.join(client("c", 2))
    cluster.join(client("d", 3))
    cluster.pass_time(LEASE + 0.5)
    assert sorted(cluster.members.silent_clients) == [2, 3]
    cluster.join(client("c", 2))
    cluster.leave(3)
    assert cluster.members.silent_clients == []


def test_a_client_whose_lease_alone_has_passed_is_served_as_before() -> None:
    with LocalCluster(WEIGHTS, servers=2, monitor=FAST) as cluster:
        user = cluster.client(top_k=K)
        agent = user._directory._agent
        assert agent is not None
        # as if its heartbeats alone did not come through
        agent.close(leave=False)
        pairs = [pair for s in cluster.servers for pair in s._control.pairs]
        assert len(pairs) == 2
        wait_until(lambda: all(pair.is_silent for pair in pairs))
        for seed in range(3):
            inputs = batch(8, seed)
            out = call(user, 1, *inputs)
            torch.testing.assert_close(out.double(), oracle(1, *inputs), rtol=1e-5, atol=1e-5)
        assert not any(pair.is_silent for pair in pairs)
        assert not {"hedges", "resends", "timeouts"} & user.counters().keys()
