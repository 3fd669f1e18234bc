"""Layers under torch.compile: whole, few graphs, shared by layers, clients and threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.compiled import assert_layer, assert_right, layer_of, remote, whole
from tests.served import batch, served

TOKENS = (7, 63, 1, 0, 5, 16)


@pytest.fixture(autouse=True)
def _no_graph_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def test_a_layer_compiles_whole_in_at_most_three_graphs_for_all_token_counts() -> None:
    with served(2) as cluster:
        moe = layer_of(cluster.client())
        compiled, graphs = whole(moe, dynamic=True)
        for num_tokens in TOKENS:
            x, _, _ = batch(num_tokens)
            assert_layer(moe, 1, x, compiled(x))
        # one for all, and one each for 0 and 1, which torch specialises
        assert graphs.frame_count <= 3


@torch.no_grad()
def test_experts_alone_compile_whole_in_at_most_three_graphs() -> None:
    with served(2) as cluster:
        compiled, graphs = whole(remote(cluster.client(), 3), dynamic=True)
        for num_tokens in TOKENS:
            inputs = batch(num_tokens)
            found = compiled(*inputs)
            assert_right(3, inputs, found)
        assert graphs.frame_count <= 3


@torch.no_grad()
def test_layers_that_differ_in_number_or_client_alone_share_one_graph() -> None:
    with served(2) as cluster:
        clients = [cluster.client(), cluster.client()]
        graphs = CompileCounterWithBackend("aot_eager")
        x, _, _ = batch(5)
        # more than the eight graphs after which torch gives a function up
        for i in range(10):
            layer = 1 + 2 * (i % 2)
            moe = layer_of(clients[i // 5], layer)
            compiled = torch.compile(moe, fullgraph=True, backend=graphs)
            assert_layer(moe, layer, x, compiled(x))
        assert graphs.frame_count == 1
        assert [c.counters()["dispatches"] for c in clients] == [5, 5]


@torch.no_grad()
def test_two_threads_share_a_compiled_layer_and_its_graph() -> None:
    with served(2) as cluster:
        moe = layer_of(cluster.client())
        compiled, graphs = whole(moe, dynamic=True)
        compiled(batch(6)[0])
        found: dict[int, list[Tensor]] = {0: [], 1: []}

        # torch keeps whether gradients are wanted per thread, and looks at it before each graph
        @torch.no_grad()
        def decode(micro_batch: int) -> None:
            for step in range(20):
                found[micro_batch].append(compiled(batch(6, seed=2 * step + micro_batch)[0]))

        threads = [threading.Thread(target=decode, args=(i,)) for i in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for micro_batch, outs in found.items():
            assert len(outs) == 20
            for step, out in enumerate(outs):
                assert_layer(moe, 1, batch(6, seed=2 * step + micro_batch)[0], out)
        assert graphs.frame_count == 1


@torch.no_grad()
def test_the_halves_may_lie_in_two_graphs() -> None:
    with served(2) as cluster:
        client = cluster.client()
        experts = remote(client)

        def broken(*inputs: Tensor) -> Tensor:
            ticket = experts.dispatch(*inputs)
            torch._dynamo.graph_break()
            return experts.combine(ticket)

        inputs = batch(4)
        out = torch.compile(broken, backend="aot_eager")(*inputs)
        assert_right(1, inputs, out)
