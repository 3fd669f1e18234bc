"""Double-batch overlap of a compiled model: one graph for all micro-batches, the plain results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.overlapping import NEVER, Model, cluster_and_client
from tests.served import D, E, K
from torch_eaas.dbo import DoubleBatchOverlap
from torch_eaas.routers import GroupLimitedRouter


@pytest.fixture(autouse=True)
def _no_graph_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
def test_micro_batches_of_one_shape_share_a_graph(is_warm: bool) -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    with cluster_and_client(combine="exact", hedge_after=NEVER) as (_, client):
        torch.manual_seed(5)
        model = Model(client, GroupLimitedRouter(D, E, K, n_group=4, topk_group=2))
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        x_TD = torch.randn(12, D)
        if is_warm:
            compiled(x_TD[:4])
        overlap = DoubleBatchOverlap(client, num_micro_batches=3)
        expected_TD = torch.cat([model(part_TD) for part_TD in x_TD.split(4)])
        for _ in range(3):
            torch.testing.assert_close(overlap(compiled, x_TD), expected_TD)
        assert graphs.frame_count == 1
        assert client.counters()["dispatches"] == 2 * (3 + 3 * 3 + is_warm)
