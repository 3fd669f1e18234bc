"""A client and servers that read the same checkpoint are together the whole model."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

import torch_eaas
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.config import ClientConfig, ServerConfig, Storage
from torch_eaas.dbo import DoubleBatchOverlap
from torch_eaas.experts import ExpertPool
from torch_eaas.models.checkpoint import Checkpoint
from torch_eaas.models.load import load_client, load_local
from torch_eaas.models.moe import read_experts, read_shape
from torch_eaas.server import ExpertServer

SHAKESPEARE = Path(torch_eaas.__file__).parent / "assets" / "shakespeare"
OPTIONS = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


@contextmanager
def served(path: Path, storage: Storage) -> Iterator[Client]:
    """Let two servers hold the even and the odd experts of all layers."""
    transport = LoopbackTransport()
    with ExitStack() as stack, Checkpoint(path) as checkpoint:
        shape = read_shape(checkpoint)
        servers = []
        for first in (0, 1):
            pool = ExpertPool(shape.hidden_size, shape.intermediate_size, storage=storage)
            own = range(first, shape.num_experts, 2)
            for layer in shape.moe_layers:
                for expert, weights in read_experts(checkpoint, layer, own, storage=storage):
                    pool.add(layer, expert, weights)
            server = ExpertServer(pool, ServerConfig(name=f"server-{first}"), transport=transport)
            servers.append(stack.enter_context(server.serve_in_background()).address)
        config = ClientConfig(hidden_size=shape.hidden_size, top_k=shape.top_k)
        client = Client(config, servers=servers, transport=transport)
        stack.callback(client.close)
        client.wait_ready(shape.moe_layers, shape.num_experts)
        yield client


@pytest.mark.parametrize("storage", ["fp32", "fp8"])
@torch.no_grad()
def test_logits_are_those_of_the_local_model(tiny, storage: Storage) -> None:
    ids = torch.arange(16).view(2, 8)
    with served(tiny.path, storage) as client:
        found = load_client(tiny.path, client)(ids).logits
    torch.testing.assert_close(found, load_local(tiny.path)(ids).logits)


@pytest.mark.parametrize("count", [2, 3])
def test_texts_that_overlap_are_the_local_models(count: int) -> None:
    prompts = torch.tensor([list(text) for text in (b"ROMEO:", b"JULIET", b"O, no!", b"A day ")])
    prompts = torch.cat([prompts, prompts.flip(1)[:1]])
    mask = torch.ones_like(prompts)
    with served(SHAKESPEARE, "fp32") as client:
        model = load_client(SHAKESPEARE, client)
        overlap = DoubleBatchOverlap(client, num_micro_batches=count)
        found = overlap(model.generate, prompts, attention_mask=mask, **OPTIONS)
        logits = overlap(model, prompts, attention_mask=mask, use_cache=False).logits
    local = load_local(SHAKESPEARE)
    assert torch.equal(found, local.generate(prompts, attention_mask=mask, **OPTIONS))
    with torch.no_grad():
        torch.testing.assert_close(logits, local(prompts, attention_mask=mask).logits)


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="the small checkpoint is not there")
def test_shipped_checkpoint_writes_the_same_text_through_servers() -> None:
    prompt = torch.tensor([list(b"ROMEO:")])
    with served(SHAKESPEARE, "fp8") as client:
        found = load_client(SHAKESPEARE, client).generate(prompt, **OPTIONS)
    expected = load_local(SHAKESPEARE).generate(prompt, **OPTIONS)
    assert found.shape == (1, 6 + 16)
    assert torch.equal(found, expected)
