"""Double-batch overlap: the plain run's results, whatever the number of micro-batches."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.overlapping import NEVER, SCALE, Model, cluster_and_client, expected, router
from tests.served import WEIGHTS, D, K, batch, call
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.config import ClientConfig
from torch_eaas.dbo import DoubleBatchOverlap
from torch_eaas.errors import ConfigError
from torch_eaas.testing import LocalCluster

# -- equality --------------------------------------------------------------------------------------


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


# -- what is refused ------------------------------------------------------------------------------


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
