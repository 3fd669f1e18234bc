"""Which clients a device server takes: those that fit what was captured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.served import D, I, K, batch, call, oracle
from tests.served_slabs import SPEC, T, client_of, server_of, slab
from tests.test_server_control import HELLO
from torch_eaas.comm.window import local_window
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.errors import ConfigError, HandshakeRefused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"top_k": K + 1}, f"has top_k {K + 1}, server device was started for {K}; give both"),
        ({"max_tokens": T + 1}, f"has max_tokens {T + 1}, server device .* for at most {T};"),
        ({"max_micro_batches": 2}, "has slots 3, server device was started for at most 2; give"),
        ({"wire_dtype": "bf16"}, "has wire_dtype bf16, server device was started for fp32;"),
        ({"reply_dtype": "bf16"}, "has reply_dtype bf16, server device was started for fp32;"),
        ({"combine": "exact"}, "has combine exact, server device was started for partial;"),
        ({"hidden_size": D + 1}, f"has hidden size {D + 1}, server device has {D}"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_client_that_differs_from_what_was_captured_is_refused_by_name(
    changed: dict[str, Any], message: str
) -> None:
    spec = dataclasses.replace(SPEC, **{k: v for k, v in changed.items() if k in vars(SPEC)})
    spec = dataclasses.replace(spec, slots=changed.get("max_micro_batches", 1) + 1)
    windows = [local_window(spec.reply_bytes)]
    with server_of(slab()) as server, pytest.raises(HandshakeRefused, match=message):
        server._control.handle(1, "handshake", {**HELLO, "spec": spec.to_json()}, windows)
    assert server.num_clients == 0


def test_fewer_slots_and_tokens_are_welcome() -> None:
    spec = dataclasses.replace(SPEC, slots=3, max_tokens=T + 2)
    with (
        server_of(slab(), spec).serve_in_background() as server,
        client_of(server) as client,
    ):
        inputs = batch(3)
        out = call(client, 1, *inputs)
        torch.testing.assert_close(out.double(), oracle(1, *inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_captured_on_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda', but this torch .* finds no CUDA GPU"):
        ExpertSlab(D, I, slots=1, max_layers=1, max_experts=1)
