from __future__ import annotations

import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from tests.monitor.planned import FAST
from torch_eaas.config import ClientConfig
from torch_eaas.device.server import DeviceServer
from torch_eaas.errors import ConfigError, ExpertUnavailable
from torch_eaas.experts import ExpertPool, ExpertWeights
from torch_eaas.remote_moe import RemoteExperts
from torch_eaas.testing import DelayedExperts, FaultPlan, LocalCluster, random_experts
from torch_eaas.testing.experts import MOST_LATE_S

D, I, E, K = 24, 16, 6, 2
X_TD = torch.linspace(-1, 1, 3 * D).view(3, D)
IDS_TK = torch.tensor([[0, 5], [3, -1], [2, 4]])
WEIGHTS_TK = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])


def dense(weights: dict[tuple[int, int], ExpertWeights], layer: int) -> Tensor:
    """Return what the experts give for the inputs above, one row at a time."""
    out_TD = torch.zeros_like(X_TD)
    for token, ids in enumerate(IDS_TK.tolist()):
        for k, expert in enumerate(ids):
            if expert >= 0:
                w = weights[layer, expert]
                inner = F.silu(X_TD[token] @ w.gate_ID.T) * (X_TD[token] @ w.up_ID.T)
                out_TD[token] += WEIGHTS_TK[token, k] * (inner @ w.down_DI.T)
    return out_TD


def test_random_experts_depend_on_the_seed_alone() -> None:
    one, same, other = (random_experts(D, I, [1, 2], E, seed) for seed in (3, 3, 4))
    assert list(one) == [(layer, e) for layer in (1, 2) for e in range(E)]
    assert torch.equal(one[2, 5].down_DI, same[2, 5].down_DI)
    assert not torch.equal(one[2, 5].down_DI, other[2, 5].down_DI)
    assert not torch.equal(one[1, 0].gate_ID, one[2, 0].gate_ID)


@pytest.mark.parametrize("per_expert", [False, True])
def test_delayed_experts_sleep_and_return_zeros(per_expert: bool) -> None:
    delay = timedelta(milliseconds=20)
    experts = DelayedExperts(D, {1: (0, 2)}, delay)
    groups_TK, unknown = experts.table.groups(1, np.array([[0, 2], [1, -1]]))
    assert (groups_TK.tolist(), unknown) == ([[0, 1], [-1, -1]], [1])
    start, busy = time.monotonic(), time.thread_time()
    out = experts.run(
        experts.table,
        torch.ones(2, D),
        torch.from_numpy(groups_TK),
        torch.ones(2, 2),
        per_expert=per_expert,
    )
    busy = time.thread_time() - busy
    assert time.monotonic() - start >= delay.total_seconds()
    assert busy < delay.total_seconds() / 2
    assert torch.equal(out, torch.zeros((2, 2, D) if per_expert else (2, D)))
    assert (experts.hidden_size, experts.holdings) == (D, {1: (0, 2)})


def test_a_sleep_makes_up_for_late_ones_by_little() -> None:
    delay = timedelta(milliseconds=2)
    experts = DelayedExperts(D, {1: (0,)}, delay)
    for _ in range(20):
        started = time.monotonic()
        run = experts.run(
            experts.table,
            torch.ones(1, D),
            torch.zeros(1, 1, dtype=torch.int64),
            torch.ones(1, 1),
            per_expert=False,
        )
        assert time.monotonic() - started >= delay.total_seconds() - MOST_LATE_S
        assert torch.equal(run, torch.zeros(1, D))
    # no sleep ends early, so some time has been saved up
    assert 0 < experts._late_s <= MOST_LATE_S


def test_delayed_experts_pass_a_pools_answers_on() -> None:
    pool = ExpertPool(D, I)
    pool.update(random_experts(D, I, [0], E, seed=1))
    experts = DelayedExperts(D, pool.holdings, timedelta(0), pool=pool)
    groups_TK = torch.from_numpy(experts.table.groups(0, IDS_TK.numpy())[0])
    wanted = pool(X_TD, groups_TK, WEIGHTS_TK)
    got = experts.run(experts.table, X_TD, groups_TK, WEIGHTS_TK, per_expert=False)
    assert torch.equal(got, wanted)
    with pytest.raises(ConfigError, match="hidden size 24, not 8"):
        DelayedExperts(8, pool.holdings, timedelta(0), pool=pool)


def test_a_cluster_serves_what_it_was_given() -> None:
    weights = random_experts(D, I, [1, 4], E, seed=1)
    with LocalCluster(weights, servers=3, copies=2) as cluster:
        assert [server.num_clients for server in cluster.servers] == [0, 0, 0]
        client = cluster.client(top_k=K)
        for layer in (1, 4):
            experts = RemoteExperts(client, layer=layer, num_experts=E, top_k=K)
            got = experts(X_TD, IDS_TK, WEIGHTS_TK)
            torch.testing.assert_close(got, dense(weights, layer), rtol=1e-5, atol=1e-5)
        assert client.config.hidden_size == D
    cluster.close()


def test_a_killed_server_is_replaced_by_its_copies() -> None:
    weights = random_experts(D, I, [0], E, seed=1)
    with LocalCluster(weights, servers=3, copies=2) as cluster:
        client = cluster.client(top_k=K)
        experts = RemoteExperts(client, layer=0, num_experts=E, top_k=K)
        cluster.kill(1)
        cluster.kill(1)
        got = experts(X_TD, IDS_TK, WEIGHTS_TK)
        torch.testing.assert_close(got, dense(weights, 0), rtol=1e-5, atol=1e-5)
        # a client that comes later does without it
        assert cluster.client(top_k=K, name="late").placement.missing([0], E) == []


def test_a_request_to_a_killed_server_gets_no_answer() -> None:
    weights = random_experts(D, I, [0], E, seed=1)
    with LocalCluster(weights, servers=1) as cluster:
        client = cluster.client(top_k=K, recovery_timeout=timedelta(seconds=0.2))
        experts = RemoteExperts(client, layer=0, num_experts=E, top_k=K)
        ticket = experts.dispatch(X_TD, IDS_TK, WEIGHTS_TK)
        experts.combine(ticket)
        cluster.kill(0)
        with pytest.raises(ExpertUnavailable, match="layer 0"):
            experts.combine(experts.dispatch(X_TD, IDS_TK, WEIGHTS_TK))


ON_DEVICE = ClientConfig(
    hidden_size=D,
    top_k=K,
    max_tokens=3,
    combine="exact",
    graph_wait=timedelta(seconds=1),
    # however busy the machine is
    request_timeout=timedelta(seconds=30),
)


def test_a_cluster_of_device_servers_serves_both_kinds_of_clients_also_after_a_kill() -> None:
    weights = random_experts(D, I, [1, 4], E, seed=1)
    with LocalCluster(weights, servers=3, copies=2, on_device=ON_DEVICE) as cluster:
        assert {type(server) for server in cluster.servers} == {DeviceServer}
        hosts = cluster.client(top_k=K, max_tokens=3, combine="exact")
        for client in (cluster.device_client(max_servers=3), hosts):
            for layer in (1, 4):
                experts = RemoteExperts(client, layer=layer, num_experts=E, top_k=K)
                got = experts(X_TD, IDS_TK, WEIGHTS_TK)
                torch.testing.assert_close(got, dense(weights, layer), rtol=1e-5, atol=1e-5)
        cluster.kill(1)
        late = cluster.device_client()
        assert [server.name for server in late.placement.servers] == ["server-0", "server-2"]
        experts = RemoteExperts(late, layer=4, num_experts=E, top_k=K)
        got = experts(X_TD, IDS_TK, WEIGHTS_TK)
        torch.testing.assert_close(got, dense(weights, 4), rtol=1e-5, atol=1e-5)


def test_a_device_standby_loads_what_its_dead_neighbour_held() -> None:
    weights = random_experts(D, I, [0], E, seed=1)
    with LocalCluster(weights, servers=1, standbys=1, monitor=FAST, on_device=ON_DEVICE) as cluster:
        experts = RemoteExperts(cluster.device_client(), layer=0, num_experts=E, top_k=K)
        cluster.kill(0)
        got = experts(X_TD, IDS_TK, WEIGHTS_TK)
        torch.testing.assert_close(got, dense(weights, 0), rtol=1e-5, atol=1e-5)
        assert cluster.servers[1].experts.holdings == {0: tuple(range(E))}


def test_a_device_client_asks_host_driven_servers_too() -> None:
    weights = random_experts(D, I, [0], E, seed=1)
    with LocalCluster(weights, servers=2) as cluster:
        experts = RemoteExperts(cluster.device_client(ON_DEVICE), layer=0, num_experts=E, top_k=K)
        got = experts(X_TD, IDS_TK, WEIGHTS_TK)
        torch.testing.assert_close(got, dense(weights, 0), rtol=1e-5, atol=1e-5)
        with pytest.raises(ConfigError, match="device_client needs a config, or the cluster on_d"):
            cluster.device_client()


def test_device_servers_have_no_planned_faults() -> None:
    weights = random_experts(D, I, [0], E, seed=1)
    with pytest.raises(ConfigError, match="a plan makes host-driven servers fail; kill"):
        LocalCluster(weights, plan=FaultPlan([]), on_device=ON_DEVICE)
