"""A device server among others: the monitor's member, beside hosts, and for another process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from tests.monitor.planned import FAST, wait_until
from tests.ops.host_end import FORGER, script
from tests.ops.host_end import SPEC as ASKED
from tests.ops.processes import host_end, needs_x86, told
from tests.protocol import record_traces
from tests.served import LAYERS, WEIGHTS, D, E, I, K
from tests.served_slabs import R, server_of
from tests.test_recovery import MODEL, right, states
from torch_eaas.config import ServerConfig
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.device.server import DeviceServer
from torch_eaas.experts import ExpertPool, ExpertWeights
from torch_eaas.protocol.layout import PairSpec, Status
from torch_eaas.testing import LocalCluster

SPEC = PairSpec(hidden_size=D, top_k=K, slots=4, max_tokens=128)


def empty_slab(slots: int) -> ExpertSlab:
    return ExpertSlab(
        D,
        I,
        slots=slots,
        max_layers=max(LAYERS) + 1,
        max_experts=E,
        storage="fp32",
        device="cpu",
    )


@contextmanager
def device_member(cluster: LocalCluster, slab: ExpertSlab, room: int) -> Iterator[DeviceServer]:
    """Run a device server that loads what the monitor asks for."""

    def load(pairs: Sequence[tuple[int, int]]) -> None:
        slab.update({pair: WEIGHTS[pair] for pair in pairs})

    server = DeviceServer(
        slab,
        SPEC,
        ServerConfig(name="device", room=room, max_pairs=2, drain_timeout=timedelta(seconds=10)),
        max_requests=R,
        transport=cluster.transport,
        monitor=cluster.monitor_url,
        model=MODEL,
        load=load,
    )
    with server.serve_in_background():
        yield server


def test_what_the_last_host_held_is_loaded_into_a_slabs_free_slots() -> None:
    slab = empty_slab(len(WEIGHTS))
    with (
        LocalCluster(WEIGHTS, servers=1, monitor=FAST) as cluster,
        device_member(cluster, slab, room=len(WEIGHTS)) as server,
    ):
        client = cluster.client(top_k=K)
        wait_until(lambda: "device" in states(cluster))
        right(client)
        cluster.kill(0)
        right(client)
        right(client, 3, 1)
        assert slab.holdings == dict.fromkeys(LAYERS, tuple(range(E)))
        assert server.counters()["experts_loaded"] == len(WEIGHTS)
        wait_until(lambda: server.counters()["requests"] >= 2)


def test_a_slab_that_is_fuller_than_its_server_says_fails_the_load_and_says_what_to_raise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slab = empty_slab(3)
    with (
        LocalCluster(WEIGHTS, servers=1, monitor=FAST) as cluster,
        device_member(cluster, slab, room=len(WEIGHTS)) as server,
    ):
        wait_until(lambda: "device" in states(cluster))
        cluster.kill(0)
        wait_until(lambda: server.counters().get("load_failures"))
    assert "of this slab's 3 3 are free; raise slots (torch-eaas server --room)" in caplog.text


def test_clients_go_to_a_host_driven_holder_when_a_device_server_drains() -> None:
    slab = empty_slab(len(WEIGHTS))
    slab.update(WEIGHTS)
    with (
        LocalCluster(WEIGHTS, servers=1, monitor=FAST) as cluster,
        device_member(cluster, slab, room=0) as server,
    ):
        client = cluster.client(top_k=K)
        wait_until(lambda: "device" in states(cluster))
        right(client)
        server.drain()
        for seed in range(3):
            right(client, seed=seed)
        assert server._left.wait(15)
        right(client, 3)
        assert server.counters().get("refused_draining", 0) == 0


def asked_weights() -> dict[tuple[int, int], ExpertWeights]:
    """Return experts of the widths that the asking process has."""
    made = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made) * 0.3

    width = record_traces.D
    return {
        (layer, expert): ExpertWeights(matrix(I, width), matrix(I, width), matrix(width, I))
        for layer in record_traces.LAYERS
        for expert in range(record_traces.E)
    }


@needs_x86
def test_another_process_is_answered_over_shared_memory_and_a_forged_frame_is_refused() -> None:
    weights = asked_weights()
    slab = ExpertSlab(
        record_traces.D,
        I,
        slots=len(weights),
        max_layers=max(record_traces.LAYERS) + 1,
        max_experts=record_traces.E,
        storage="fp32",
        device="cpu",
    )
    slab.update(weights)
    pool = ExpertPool(record_traces.D, I)
    pool.update(weights)
    with (
        server_of(slab, ASKED).serve_in_background() as server,
        host_end("ask", server.address) as client,
    ):
        for layer, *parts in script():
            x, ids, w = (torch.tensor(part) for part in parts)
            groups_TK, _ = pool.table.groups(layer, ids.int().numpy())
            expected = pool(x, torch.from_numpy(groups_TK), w)
            torch.testing.assert_close(torch.tensor(told(client)), expected, rtol=1e-4, atol=1e-4)
        *header, text = told(client)
    assert text == "instance, epoch or sequence is not this window's, this word's"
    assert header == [FORGER, 1, 1, 0, Status.STALE, len(text), 0, 0]
