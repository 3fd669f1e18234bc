"""The carried checkpoint: whoever holds its experts, and whoever dies, the text is the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torch_eaas
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.experts import ExpertPool
from torch_eaas.models.checkpoint import Checkpoint
from torch_eaas.models.load import load_client, load_local
from torch_eaas.models.moe import find_family, read_experts, read_shape
from torch_eaas.placement import share
from torch_eaas.server import ExpertServer

CARRIED = Path(torch_eaas.__file__).parent / "assets" / "shakespeare"
PROMPT = torch.tensor([list(b"ROMEO:\nBut soft, what light")])
GREEDY = {"max_new_tokens": 256, "do_sample": False, "pad_token_id": 0}
PLACEMENTS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)]


@pytest.fixture(scope="module")
def local() -> Any:
    return load_local(CARRIED)


@pytest.fixture(scope="module")
def expected(local: Any) -> torch.Tensor:
    return local.generate(PROMPT, **GREEDY)


@contextmanager
def served(
    num_servers: int, copies: int, **options: Any
) -> Iterator[tuple[Client, list[ExpertServer]]]:
    """Serve the checkpoint in fp32 from threads, over loopback."""
    transport = LoopbackTransport()
    servers: list[ExpertServer] = []
    with ExitStack() as stack, Checkpoint(CARRIED) as checkpoint:
        shape = read_shape(checkpoint)
        for i in range(num_servers):
            pool = ExpertPool(shape.hidden_size, shape.intermediate_size)
            held = share(shape.moe_layers, shape.num_experts, i, num_servers, copies=copies)
            for layer, ids in held.items():
                read = read_experts(checkpoint, layer, ids, storage="fp32")
                pool.update({(layer, expert): weights for expert, weights in read})
            server = ExpertServer(pool, ServerConfig(name=f"s{i}"), transport=transport)
            servers.append(stack.enter_context(server.serve_in_background()))
        config = ClientConfig(hidden_size=shape.hidden_size, top_k=shape.top_k, **options)
        client = Client(config, servers=[s.address for s in servers], transport=transport)
        stack.callback(client.close)
        client.wait_ready(shape.moe_layers, shape.num_experts)
        yield client, servers


@pytest.mark.parametrize(("num_servers", "copies"), PLACEMENTS, ids=str)
def test_greedy_text_of_256_tokens_is_the_local_models(
    num_servers: int, copies: int, expected: torch.Tensor
) -> None:
    with served(num_servers, copies) as (client, _):
        found = load_client(CARRIED, client).generate(PROMPT, **GREEDY)
    assert torch.equal(found, expected)


def test_greedy_text_is_the_same_when_a_server_dies_in_its_middle(expected: torch.Tensor) -> None:
    class KillAt:
        """Ends a server's endpoint, as its death would, when half of the tokens are there."""

        def __init__(self, server: ExpertServer) -> None:
            self.server = server
            self.at = 0.0

        def __call__(self, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            if not self.at and ids.shape[1] > PROMPT.shape[1] + 128:
                self.at = time.monotonic()
                self.server.close()
            return torch.zeros(len(ids), dtype=torch.bool)

    with served(3, 2) as (client, servers):
        model = load_client(CARRIED, client)
        kill = KillAt(servers[1])
        found = model.generate(PROMPT, **GREEDY, stopping_criteria=[kill])
        assert kill.at
        assert client.counters()["requests"] > 0
    assert torch.equal(found, expected)


def test_logits_differ_by_less_than_a_ten_thousandth(local: Any, expected: torch.Tensor) -> None:
    with torch.no_grad(), served(3, 2) as (client, _):
        found = load_client(CARRIED, client)(expected).logits
        worst = (found - local(expected).logits).abs().max()
    assert worst <= 1e-4


def test_exact_mode_gives_bit_equal_logits_for_every_placement(expected: torch.Tensor) -> None:
    logits = []
    for num_servers, copies in PLACEMENTS:
        with torch.no_grad(), served(num_servers, copies, combine="exact") as (client, _):
            logits.append(load_client(CARRIED, client)(expected).logits)
    for other in logits[1:]:
        assert torch.equal(logits[0], other)


def first_layers(model: Any, num_layers: int) -> Any:
    """Cut a decoder off: compiling takes seconds a layer, and its layers with experts are alike."""
    del model.model.layers[num_layers:]
    model.config.num_hidden_layers = num_layers
    return model


@pytest.mark.timeout(300)
@torch.no_grad()
def test_the_decoder_compiles_whole_and_prompts_of_all_lengths_share_three_graphs() -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    expected = first_layers(load_local(CARRIED), 2)
    with served(2, 1) as (client, _):
        model = first_layers(load_client(CARRIED, client), 2)
        compiled = torch.compile(model, fullgraph=True, backend=graphs)
        for length in (9, 33, 1, 64, 2):
            ids = PROMPT.repeat(1, 3)[:, :length]
            # a length of 1 is a graph of its own; without the mark the first length is one too
            torch._dynamo.maybe_mark_dynamic(ids, 1)
            found = compiled(ids, use_cache=False).logits
            wanted = expected(ids, use_cache=False).logits
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        assert client.counters()["dispatches"] == 5
    assert graphs.frame_count <= 3


@pytest.mark.parametrize("copies", [1, 2])
def test_a_server_reads_its_own_experts_bytes_and_headers_only(copies: int) -> None:
    for i in range(3):
        with Checkpoint(CARRIED) as checkpoint:
            shape = read_shape(checkpoint)
            family = find_family(checkpoint.config)
            own = 0
            for layer, ids in share(
                shape.moe_layers, shape.num_experts, i, 3, copies=copies
            ).items():
                list(read_experts(checkpoint, layer, ids, storage="fp32"))
                for expert in ids:
                    for name in family.expert_names(layer, expert):
                        own += checkpoint.info(name).num_bytes
                        own += checkpoint.info(f"{name}_scale_inv").num_bytes
            assert own > 0
            assert checkpoint.bytes_read <= 1.02 * own
