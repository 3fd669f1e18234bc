"""Tensors of a real GPU, servers on CPUs."""

from __future__ import annotations

import pytest
import torch

from tests.served import E, batch, call, oracle, served
from torch_eaas.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_a_gpus_tokens_are_answered_by_cpu_servers_and_stay_on_the_gpu() -> None:
    with served(2) as cluster:
        client = cluster.client()
        for num_tokens in (0, 1, 7, 63, 7):
            given = batch(num_tokens, num_tokens)
            out = call(client, 1, *(tensor.cuda() for tensor in given))
            assert out.is_cuda
            torch.testing.assert_close(out.cpu().double(), oracle(1, *given), rtol=1e-5, atol=1e-5)


def test_answers_copied_back_without_a_wait_are_not_overwritten_by_later_ones() -> None:
    with served(1) as cluster:
        client = cluster.client()
        batches = [batch(7, seed) for seed in range(20)]
        given = [[tensor.cuda() for tensor in each] for each in batches]
        # the stream is busy for a while, so that copies back wait in it
        torch.cuda._sleep(100_000_000)
        outs = [call(client, 1, *each) for each in given]
        for each, out in zip(batches, outs, strict=True):
            torch.testing.assert_close(out.cpu().double(), oracle(1, *each), rtol=1e-5, atol=1e-5)


def test_a_capture_is_refused_and_may_go_on() -> None:
    with served(1) as cluster:
        client = cluster.client()
        given = [tensor.cuda() for tensor in batch(3)]
        call(client, 1, *given)
        x_TD = given[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            with pytest.raises(ConfigError, match="driven by the host"):
                client.dispatch(1, *given, num_experts=E)
            doubled_TD = x_TD * 2
        graph.replay()
        assert torch.equal(doubled_TD.cpu(), x_TD.cpu() * 2)
