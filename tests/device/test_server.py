"""A device server answers as a host-driven one does; here a CPU plays the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.ops.implementations import use_all_kernels
from tests.served import LAYERS, WEIGHTS, D, E, I, batch, call
from tests.served_slabs import (
    SPEC,
    T,
    client_of,
    server_of,
    slab,
    whole_tokens,
    whole_weights,
)
from torch_eaas.errors import ConfigError
from torch_eaas.experts import ExpertPool
from torch_eaas.ops.quantize import dequantize_blocks, quantize_blocks
from torch_eaas.protocol.layout import PairSpec

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp8": 4e-2}


def spec_of(**changed: Any) -> PairSpec:
    return PairSpec(**{**SPEC.to_json(), **changed})


def pool_of(storage: Any, weights: Any = WEIGHTS) -> ExpertPool:
    made = ExpertPool(D, I, storage=storage)
    made.update(weights)
    return made


def run_pool(made: ExpertPool, layer: int, x: Any, ids: Any, w: Any, *, per_expert: bool) -> Any:
    groups_TK, unknown = made.table.groups(layer, ids.int().numpy())
    assert not unknown
    return made(x, torch.from_numpy(groups_TK), w, per_expert=per_expert)


def through_fp8(rows: Tensor) -> Tensor:
    """Return rows as an FP8 product sees them."""
    return dequantize_blocks(*quantize_blocks(rows, (1, 128)), (1, 128))


def run_fp8(layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return what FP8 weights make of FP8 activations, which an ``ExpertPool`` does not round."""
    out_TD = torch.zeros_like(x_TD)
    for token, k in (ids_TK >= 0).nonzero().tolist():
        weights = WEIGHTS[layer, int(ids_TK[token, k])].quantized()
        gate_ID, up_ID, down_DI = weights.dequantized()
        x_1D = through_fp8(x_TD[token : token + 1])
        inner_1I = through_fp8(silu(x_1D @ gate_ID.T) * (x_1D @ up_ID.T))
        out_TD[token] += weights_TK[token, k] * (inner_1I @ down_DI.T)[0]
    return out_TD


@pytest.mark.parametrize("num_tokens", [1, 7, T, 2 * T + 3], ids=str)
@pytest.mark.parametrize(
    ("storage", "wire", "reply"),
    [
        ("fp32", "fp32", "fp32"),
        ("bf16", "bf16", "fp32"),
        ("bf16", "fp32", "bf16"),
        ("fp8", "bf16", "bf16"),
        ("fp32", "fp8", "fp32"),
        ("bf16", "fp8", "bf16"),
        ("fp8", "fp8", "fp32"),
    ],
)
def test_answers_are_a_host_driven_servers(
    storage: Any, wire: Any, reply: Any, num_tokens: int
) -> None:
    spec = spec_of(wire_dtype=wire, reply_dtype=reply)
    pool = pool_of(storage)
    with (
        server_of(slab(storage=storage), spec).serve_in_background() as server,
        client_of(server, wire_dtype=wire, reply_dtype=reply) as client,
    ):
        for layer in LAYERS:
            x, ids, w = batch(num_tokens, layer, low=-1)
            got = call(client, layer, x, ids, w)
            assert got.dtype == x.dtype
            x = {"fp32": x, "bf16": x.bfloat16().float(), "fp8": through_fp8(x)}[wire]
            if storage == "fp8":
                expected = run_fp8(layer, x, ids, w)
            else:
                expected = run_pool(pool, layer, x, ids, w, per_expert=False)
            error = (got - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCES[storage]


@pytest.mark.parametrize(
    ("combine", "wire"), [("partial", "fp32"), ("exact", "fp32"), ("partial", "fp8")]
)
@pytest.mark.parametrize("kernels", [False, True], ids=["twins", "kernels"])
def test_whole_numbers_have_the_same_bits(
    combine: Any, wire: Any, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        use_all_kernels(monkeypatch)
    weights = whole_weights()
    pool = pool_of("fp32", weights)
    spec = spec_of(combine=combine, wire_dtype=wire)
    with (
        server_of(slab(weights=weights), spec).serve_in_background() as server,
        client_of(server, combine=combine, wire_dtype=wire) as client,
    ):
        _, ids, w = batch(3, 1, low=-1)
        w = torch.round(w * 4)
        x = whole_tokens(3)
        # the largest number, so the scale is 7 / 448 and fp8 has all of them
        x[:, 1] = 7.0
        got = call(client, LAYERS[0], x, ids, w)
        rows = run_pool(pool, LAYERS[0], x, ids, w, per_expert=True)
        assert got.abs().max() > 1000
        assert torch.equal(got, rows.sum(1))


@pytest.mark.parametrize("kernels", [False, True], ids=["twins", "kernels"])
def test_two_clients_and_two_layers_share_one_iteration(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        use_all_kernels(monkeypatch)
    pool = pool_of("fp32")
    with server_of(slab()) as server, client_of(server) as one, client_of(server) as other:
        assert server.num_clients == 2
        asked = []
        for client, layer, num_tokens in ((one, LAYERS[0], 2), (other, LAYERS[1], 3)):
            inputs = batch(num_tokens, layer)
            number = client.dispatch(layer, *inputs, num_experts=E)
            asked.append((client, number, layer, inputs))
        assert server.step() == 2
        for client, number, layer, inputs in asked:
            expected = run_pool(pool, layer, *inputs, per_expert=False)
            torch.testing.assert_close(client.combine(number), expected, rtol=1e-5, atol=1e-5)
        counters = server.counters()
        assert (counters["requests"], counters["tokens"], counters["batches"]) == (2, 5, 1)


def test_a_spec_of_another_width_than_the_slabs_is_refused() -> None:
    spec = spec_of(hidden_size=D + 1)
    message = rf"the spec has hidden size {D + 1} and the slab {D}; both are the model's"
    with pytest.raises(ConfigError, match=message):
        server_of(slab(), spec)


def test_a_slab_belongs_to_one_server() -> None:
    experts = slab()
    with (
        server_of(experts),
        pytest.raises(ConfigError, match="belongs to a server already; make one for each"),
    ):
        server_of(experts)


def test_a_pair_table_that_one_block_cannot_scan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 8192 slots, .* got 4097 pairs of 2"):
        server_of(slab(), max_pairs=4097)
