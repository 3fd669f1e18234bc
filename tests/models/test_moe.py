"""A server learns the experts' sizes from a checkpoint and reads its own experts only."""

from collections.abc import Callable

import pytest
import torch

from torch_eaas.errors import CheckpointError, ConfigError
from torch_eaas.models.checkpoint import Checkpoint
from torch_eaas.models.family import MoeShape
from torch_eaas.models.moe import read_experts, read_shape

PARTS = ("gate_proj", "up_proj", "down_proj")


def _names(layer: int, expert: int) -> list[str]:
    return [f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight" for part in PARTS]


def test_shape_comes_from_the_config(tiny) -> None:
    with Checkpoint(tiny.path) as checkpoint:
        assert read_shape(checkpoint) == MoeShape(
            hidden_size=144,
            intermediate_size=136,
            moe_layers=(1, 2),
            num_experts=8,
            top_k=3,
            fingerprint=checkpoint.fingerprint,
        )
        assert checkpoint.bytes_read == checkpoint.header_bytes_read == 0


@pytest.mark.parametrize("fp8", [True, False], ids=["from-fp8", "from-bf16"])
@pytest.mark.parametrize(
    ("storage", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)], ids=str
)
def test_experts_come_in_the_order_asked_for(make_tiny, fp8: bool, storage, dtype) -> None:
    tiny = make_tiny(fp8=fp8)
    with Checkpoint(tiny.path) as checkpoint:
        pairs = list(read_experts(checkpoint, 2, [7, 0], storage=storage))
    assert [expert for expert, _ in pairs] == [7, 0]
    for expert, weights in pairs:
        assert weights.scales is None
        found = (weights.gate_ID, weights.up_ID, weights.down_DI)
        for name, tensor in zip(_names(2, expert), found, strict=True):
            assert tensor.dtype == dtype
            assert torch.equal(tensor, tiny.plain[name].to(dtype))


def test_fp8_storage_hands_on_what_is_on_disk(tiny) -> None:
    with Checkpoint(tiny.path) as checkpoint:
        [(_, weights)] = read_experts(checkpoint, 1, [3], storage="fp8")
    assert weights.block == (128, 128)
    found = (weights.gate_ID, weights.up_ID, weights.down_DI)
    for name, tensor, scale in zip(_names(1, 3), found, weights.scales, strict=True):
        assert torch.equal(tensor.view(torch.uint8), tiny.stored[name].view(torch.uint8))
        assert torch.equal(scale, tiny.stored[name + "_scale_inv"])


def test_fp8_storage_quantizes_a_plain_checkpoint(make_tiny) -> None:
    tiny = make_tiny(fp8=False)
    with Checkpoint(tiny.path) as checkpoint:
        [(_, weights)] = read_experts(checkpoint, 1, [3], storage="fp8")
    assert weights.down_DI.dtype == torch.float8_e4m3fn
    expected = tiny.plain[_names(1, 3)[2]]
    # e4m3 keeps 3 bits behind the first: half a step is 1/16; below that, subnormal steps
    tolerance = {"rtol": 1 / 16, "atol": 2e-6}
    torch.testing.assert_close(weights.dequantized()[2], expected, **tolerance)


@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp8"])
def test_server_reads_its_own_experts_bytes_and_no_others(tiny, reads, storage: str) -> None:
    names = [name for expert in (2, 5, 6) for name in _names(1, expert)]
    wanted = [tiny.ranges(n) for name in names for n in (name, name + "_scale_inv")]
    with Checkpoint(tiny.path) as checkpoint:
        list(read_experts(checkpoint, 1, [2, 5, 6], storage=storage))
        assert checkpoint.bytes_read == sum(end - start for _, start, end in wanted)
        headers = checkpoint.header_bytes_read
    assert sum(end - start for _, start, end in reads) == checkpoint.bytes_read + headers
    assert set(wanted) < set(reads)


def test_expert_is_read_when_it_is_taken(tiny) -> None:
    with Checkpoint(tiny.path) as checkpoint:
        pairs = read_experts(checkpoint, 1, range(8), storage="fp8")
        assert checkpoint.bytes_read == 0
        next(pairs)
        one = checkpoint.bytes_read
        next(pairs)
        assert checkpoint.bytes_read == 2 * one > 0


@pytest.mark.parametrize(
    ("layer", "experts", "storage", "message"),
    [
        (0, [0], "fp32", "layer 0 has no experts; layers 1 to 2 have"),
        (3, [0], "fp32", "layer 3 has no experts; layers 1 to 2 have"),
        (1, [0, 8], "fp32", "layer 1 has no expert 8; it has 0 to 7"),
        (1, [-1], "fp32", "layer 1 has no expert -1; it has 0 to 7"),
        (1, [0], "fp4", "storage must be one of fp32, bf16, fp8, got 'fp4'"),
    ],
    ids=["dense-layer", "mtp-layer", "expert-above", "expert-below", "storage"],
)
def test_experts_that_do_not_exist_are_refused_at_once(
    tiny, layer: int, experts: list[int], storage, message: str
) -> None:
    with Checkpoint(tiny.path) as checkpoint, pytest.raises(ConfigError, match=message):
        read_experts(checkpoint, layer, experts, storage=storage)


def test_expert_of_the_wrong_shape_is_named(make_tiny) -> None:
    name = _names(1, 0)[2]
    tiny = make_tiny(fp8=False, edit=lambda stored: stored.update({name: torch.ones(136, 144)}))
    message = rf"safetensors: {name}: has shape \(136, 144\), expected \(144, 136\)"
    with Checkpoint(tiny.path) as checkpoint, pytest.raises(CheckpointError, match=message):
        list(read_experts(checkpoint, 1, [0], storage="bf16"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not known, known are deepseek_v3"),
        ({"model_type": None}, "model_type None is not known, known are deepseek_v3"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act must be 'silu', got 'gelu'"),
        ({"moe_layer_freq": 2}, "config.json: moe_layer_freq must be 1, got 2"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc', got 'greedy'"),
        ({"n_routed_experts": None}, "n_routed_experts must be an integer of at least 1, got None"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be .* at least 1, got 0"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok must be an integer .* got True"),
        ({"first_k_dense_replace": 3}, "no layer has experts: first_k_dense_replace is 3 and"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_that_is_not_understood_is_refused(
    make_tiny, changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make_tiny()
    with Checkpoint(tiny.path) as checkpoint:
        monkeypatch.setattr(checkpoint, "config", checkpoint.config | changes)
        with pytest.raises(ConfigError, match=message):
            read_shape(checkpoint)


def test_settings_that_a_config_leaves_out_have_their_only_value(tiny) -> None:
    optional: Callable = {
        "hidden_act",
        "moe_layer_freq",
        "scoring_func",
        "topk_method",
    }.__contains__
    with Checkpoint(tiny.path) as checkpoint:
        expected = read_shape(checkpoint)
        checkpoint.config = {k: v for k, v in checkpoint.config.items() if not optional(k)}
        assert read_shape(checkpoint) == expected
