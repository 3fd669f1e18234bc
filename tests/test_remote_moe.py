"""RemoteMoE and RemoteExperts as modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.served import D, E, K, batch, oracle, served
from torch_eaas.errors import ConfigError, InferenceOnlyError
from torch_eaas.remote_moe import RemoteExperts, RemoteMoE
from torch_eaas.routers import SoftmaxTopKRouter


def test_the_layer_is_the_routed_sum_plus_the_shared_expert() -> None:
    torch.manual_seed(0)
    with served(2) as cluster, torch.no_grad():
        router = SoftmaxTopKRouter(D, E, K)
        shared = nn.Linear(D, D)
        experts = RemoteExperts(cluster.client(), layer=1, num_experts=E, top_k=K)
        moe = RemoteMoE(router, experts, shared)
        x = torch.randn(2, 5, D)
        out = moe(x)
        flat = x.reshape(-1, D)
        expected = oracle(1, flat, *router(flat)) + shared(flat).double()
        torch.testing.assert_close(out.double(), expected.view(2, 5, D), rtol=1e-5, atol=1e-5)


def test_the_shared_expert_runs_while_the_answer_is_under_way() -> None:
    with served(1) as cluster, torch.no_grad():
        planned = cluster.experts[0]
        client = cluster.client()
        planned.hold()

        class Shared(nn.Module):
            def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
                assert planned.entered.wait(5)
                planned.go.set()
                return x_TD

        experts = RemoteExperts(client, layer=1, num_experts=E, top_k=K)
        x, ids, w = batch(4)
        out = RemoteMoE(lambda _: (ids, w), experts, Shared())(x)
        torch.testing.assert_close(
            out.double(), oracle(1, x, ids, w) + x.double(), rtol=1e-5, atol=1e-5
        )


def test_the_halves_give_what_forward_gives() -> None:
    with served(2) as cluster, torch.no_grad():
        experts = RemoteExperts(cluster.client(), layer=3, num_experts=E, top_k=K)
        x, ids, w = batch(6)
        whole = experts(x, ids, w)
        assert torch.equal(whole, experts.combine(experts.dispatch(x, ids, w)))
        assert list(experts.parameters()) == []
        assert "layer=3, num_experts=8, top_k=2" in repr(experts)


def test_the_halves_of_a_layer_by_hand_give_what_its_forward_gives() -> None:
    with served(2) as cluster, torch.no_grad():
        # two of the calls may share a batch, of which sums in partial mode may show
        client = cluster.client(combine="exact")
        experts = RemoteExperts(client, layer=3, num_experts=E, top_k=K)
        x, ids, w = batch(6)
        moe = RemoteMoE(lambda _: (ids, w), experts, nn.Tanh())
        first = moe.dispatch(x.view(2, 3, -1))
        second = moe.dispatch(x)
        whole = moe(x)
        assert torch.equal(moe.combine(second), whole)
        assert torch.equal(moe.combine(first), whole.view(2, 3, -1))


def test_backward_raises_an_error_that_says_what_to_do() -> None:
    with served(1) as cluster:
        experts = RemoteExperts(cluster.client(), layer=1, num_experts=E, top_k=K)
        x, ids, w = batch(4)
        out = experts(x.requires_grad_(), ids, w)
        with pytest.raises(InferenceOnlyError, match=r"call the model under torch.no_grad\(\)"):
            out.sum().backward()


def test_another_top_k_than_the_clients_is_refused() -> None:
    with (
        served(1) as cluster,
        pytest.raises(ConfigError, match="layer 1 has top_k 3, its client 2"),
    ):
        RemoteExperts(cluster.client(), layer=1, num_experts=E, top_k=3)
