"""The carried checkpoint over device servers: Hugging Face's decoder asks by a ``DeviceClient``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torch_eaas
from torch_eaas.config import ClientConfig
from torch_eaas.device.client import DeviceClient
from torch_eaas.errors import ConfigError
from torch_eaas.models.checkpoint import Checkpoint
from torch_eaas.models.load import load_client, load_local
from torch_eaas.models.moe import read_experts, read_shape
from torch_eaas.testing import LocalCluster

CARRIED = Path(torch_eaas.__file__).parent / "assets" / "shakespeare"
PROMPTS = torch.tensor([list(b"ROMEO:\nBut soft,"), list(b"JULIET:\nO Romeo,")])
GREEDY: dict[str, Any] = {
    "max_new_tokens": 8,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
}
CONFIG = ClientConfig(
    hidden_size=144, top_k=4, max_tokens=PROMPTS.numel(), graph_wait=timedelta(seconds=20)
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two device servers, which share the experts."""
    with Checkpoint(CARRIED) as checkpoint:
        shape = read_shape(checkpoint)
        weights = {
            (layer, expert): read
            for layer in shape.moe_layers
            for expert, read in read_experts(
                checkpoint, layer, range(shape.num_experts), storage="fp32"
            )
        }
    with LocalCluster(weights, servers=2, on_device=CONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> DeviceClient:
    return cluster.device_client()


def test_texts_are_those_of_a_host_driven_client_and_of_the_local_model(
    cluster: LocalCluster, client: DeviceClient
) -> None:
    mask = torch.ones_like(PROMPTS)
    host = cluster.client(top_k=CONFIG.top_k, max_tokens=CONFIG.max_tokens)
    before = client.counters().get("dispatches", 0)
    found = load_client(CARRIED, client).generate(PROMPTS, attention_mask=mask, **GREEDY)
    # the prompts are one forward pass, and each token but the last is one; four layers have experts
    assert client.counters()["dispatches"] - before == 4 * GREEDY["max_new_tokens"]
    assert found.shape == (2, PROMPTS.shape[1] + GREEDY["max_new_tokens"])
    for other in (load_client(CARRIED, host), load_local(CARRIED)):
        assert torch.equal(other.generate(PROMPTS, attention_mask=mask, **GREEDY), found)


def test_a_prompt_above_max_tokens_is_refused_in_words_and_runs_in_parts(
    cluster: LocalCluster,
) -> None:
    prompt = PROMPTS[:1]
    with_few = replace(CONFIG, max_tokens=6)
    model = load_client(CARRIED, cluster.device_client(with_few))
    told = r"layer 1: 16 tokens at once are more than max_tokens 6, .*prefill_chunk_size"
    with pytest.raises(ConfigError, match=told):
        model.generate(prompt, **GREEDY)
    found = model.generate(prompt, prefill_chunk_size=6, **GREEDY)
    assert torch.equal(found, load_local(CARRIED).generate(prompt, **GREEDY))


def one_layer(model: Any) -> Any:
    """Keep one layer, which has experts: compiling takes seconds for each."""
    del model.model.layers[2:], model.model.layers[0]
    model.config.num_hidden_layers = 1
    return model


@pytest.mark.timeout(300)
@torch.no_grad()
def test_the_decoder_compiles_whole(client: DeviceClient) -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    expected = one_layer(load_local(CARRIED))
    model = one_layer(load_client(CARRIED, client))
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    before = client.counters().get("dispatches", 0)
    for ids in (PROMPTS, PROMPTS.flip(0)):
        found = compiled(ids, use_cache=False).logits
        wanted = expected(ids, use_cache=False).logits
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert client.counters()["dispatches"] - before == 2
    assert graphs.frame_count == 1
