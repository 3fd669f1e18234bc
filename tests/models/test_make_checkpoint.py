import json
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the checkpoint is trained with transformers")

from transformers import DeepseekV3Config

from benchmarks.export_checkpoint import load_checkpoint
from benchmarks.make_checkpoint import SIZES, export
from benchmarks.train_checkpoint import (
    Corpus,
    ExpertLoad,
    TrainConfig,
    Trainer,
    evaluate,
    learning_rate,
    skews,
)
from torch_eaas.errors import ConfigError

# one dense layer, two MoE layers of 8 experts, no size a multiple of 128
TINY = SIZES | {
    "hidden_size": 136,
    "intermediate_size": 72,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
}
TRAIN = TrainConfig(steps=2, batch=2, length=16, settle_steps=3)
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 40)
    return path


@pytest.fixture(scope="module")
def trained(text: Path) -> Trainer:
    trainer = Trainer(Corpus.read(text), TRAIN, DeepseekV3Config(**TINY))
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def weights(trained: Trainer) -> dict[str, Tensor]:
    """Return the trained weights, copied before the export replaces them by what it wrote."""
    return {name: value.clone() for name, value in trained.model.state_dict().items()}


@pytest.fixture(scope="module")
def folder(
    trained: Trainer, weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    export(trained, path, "fox.txt")
    return path


def headers(folder: Path) -> Iterator[tuple[str, str, str, list[int], bytes]]:
    """Yield shard, name, dtype, shape and bytes of each stored tensor, as the format says."""
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        body = data[8 + size :]
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                yield file.name, name, entry["dtype"], entry["shape"], body[first:last]


def fp8_names(layer: int) -> list[str]:
    """Return the names of a layer's FP8 linears in DeepSeek-R1's files."""
    mlps = ["mlp"]
    if layer > 0:
        mlps = ["mlp.shared_experts", *(f"mlp.experts.{expert}" for expert in range(8))]
    linears = [f"self_attn.{part}" for part in ATTENTION]
    linears += [f"{mlp}.{part}" for mlp in mlps for part in MLP]
    return [f"model.layers.{layer}.{linear}.weight" for linear in linears]


def expected_dtypes() -> dict[str, str]:
    """Return every tensor that DeepSeek-R1 would have at these sizes, with its dtype."""
    found = {"model.embed_tokens.weight": "BF16", "model.norm.weight": "BF16"}
    found["lm_head.weight"] = "BF16"
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{norm}.weight"] = "BF16"
        for norm in ("q_a_layernorm", "kv_a_layernorm"):
            found[f"{prefix}self_attn.{norm}.weight"] = "BF16"
        for name in fp8_names(layer):
            found[name], found[name + "_scale_inv"] = "F8_E4M3", "F32"
        if layer > 0:
            found[f"{prefix}mlp.gate.weight"] = "BF16"
            found[f"{prefix}mlp.gate.e_score_correction_bias"] = "F32"
    for part in ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm"):
        found[f"model.layers.3.{part}.weight"] = "BF16"
    found["model.layers.3.shared_head.head.weight"] = "BF16"
    return found


def dequantised(folder: Path) -> dict[str, Tensor]:
    """Read all tensors as fp32, blocks brought back by a Kronecker product with ones."""
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    stored = {
        name: torch.frombuffer(bytearray(data), dtype=dtypes[dtype]).reshape(shape).float()
        for _, name, dtype, shape, data in headers(folder)
    }
    for name in [name for name in stored if name + "_scale_inv" in stored]:
        rows, columns = stored[name].shape
        scale = torch.kron(stored.pop(name + "_scale_inv"), torch.ones(128, 128))
        stored[name] = stored[name] * scale[:rows, :columns]
    return stored


def test_the_index_names_every_tensor_of_r1_exactly_once(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    entries = list(headers(folder))
    assert Counter(name for _, name, *_ in entries).most_common(1)[0][1] == 1
    assert {name: shard for shard, name, *_ in entries} == index["weight_map"]
    assert {name: dtype for _, name, dtype, *_ in entries} == expected_dtypes()
    assert sum(len(data) for *_, data in entries) == index["metadata"]["total_size"]


def test_some_scales_lie_in_another_shard_than_their_weights(folder: Path) -> None:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    scales = [name for name in weight_map if name.endswith("_scale_inv")]
    apart = [n for n in scales if weight_map[n] != weight_map[n.removesuffix("_scale_inv")]]
    assert len(set(weight_map.values())) >= 3
    assert 0 < len(apart) < len(scales)


def test_the_stored_tensors_are_the_trained_weights_within_fp8s_error(
    folder: Path, weights: dict[str, Tensor]
) -> None:
    stored = dequantised(folder)
    compared = set()
    for name, value in weights.items():
        prefix, fused, kind = name.partition(".mlp.experts.")
        pairs = {name: value}
        if fused and kind == "gate_up_proj":
            pairs = {f"{prefix}{fused}{e}.gate_proj.weight": value[e, :24] for e in range(8)}
            pairs |= {f"{prefix}{fused}{e}.up_proj.weight": value[e, 24:] for e in range(8)}
        elif fused:
            pairs = {f"{prefix}{fused}{e}.down_proj.weight": value[e] for e in range(8)}
        for disk_name, expected in pairs.items():
            # half a step: 2**-4 of the value with 3 mantissa bits, and 2**-10 of the block's scale
            atol = float(expected.abs().max()) / 448 * 2**-10
            torch.testing.assert_close(stored[disk_name], expected, rtol=2**-4, atol=atol)
            compared.add(disk_name)
    assert {name for name in stored if not name.startswith("model.layers.3.")} == compared


def test_the_mtp_layer_copies_the_embedding_and_the_head(folder: Path) -> None:
    stored = dequantised(folder)
    prefix = "model.layers.3."
    assert torch.equal(stored[prefix + "embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert torch.equal(stored[prefix + "shared_head.head.weight"], stored["lm_head.weight"])
    assert stored[prefix + "eh_proj.weight"].shape == (136, 272)


def test_the_folder_loads_into_a_fresh_model_that_predicts_as_the_readme_says(
    folder: Path, trained: Trainer
) -> None:
    fresh = Trainer(
        trained.corpus, TrainConfig(steps=1, length=16, seed=7), DeepseekV3Config(**TINY)
    )
    load_checkpoint(folder, fresh.model)
    loss = evaluate(fresh.model, trained.corpus.held_out, 16)
    assert f"as stored here, in FP8 | {loss:.4f} nats" in (folder / "README.md").read_text()


def test_config_json_reads_as_r1s_does(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert {key: config[key] for key in TINY} == TINY
    assert config["model_type"] == "deepseek_v3"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }


def test_balance_raises_the_bias_of_idle_experts_and_lowers_that_of_busy_ones() -> None:
    model = Trainer(Corpus(torch.zeros(99), torch.zeros(99)), TRAIN, DeepseekV3Config(**TINY)).model
    load = ExpertLoad(model)
    counts_LE = torch.tensor([[8.0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    load.balance(counts_LE, 0.5)
    assert load.routers[0].e_score_correction_bias.tolist() == [-0.5] + [0.5] * 7
    assert load.routers[1].e_score_correction_bias.tolist() == [0.0] * 8


def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    config = TrainConfig(steps=1000, learning_rate=1.0, warmup=100)
    rates = [learning_rate(step, config) for step in (0, 49, 99, 100, 550, 1000)]
    assert rates == pytest.approx([0.01, 0.5, 1.0, 1.0, 0.5, 0.0])


def test_skew_is_the_largest_and_smallest_load_over_the_mean() -> None:
    assert skews(torch.tensor([[2.0, 1, 0, 1], [3, 3, 3, 3]])) == "2.00 (0.00), 1.00 (1.00)"


def test_training_goes_on_from_a_saved_state_bit_by_bit(
    text: Path, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    state = tmp_path / "state.pt"
    first = Trainer(Corpus.read(text), TRAIN, DeepseekV3Config(**TINY))
    first.advance(next(first.corpus.batches(TRAIN, first.generator)))
    first.save(state)
    second = Trainer(Corpus.read(text), TRAIN, DeepseekV3Config(**TINY))
    second.resume(state)
    second.run(state)
    again = second.model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in weights.items())


def test_settling_moves_the_routers_biases_and_no_weight(
    text: Path, weights: dict[str, Tensor]
) -> None:
    unsettled = Trainer(Corpus.read(text), replace(TRAIN, settle_steps=0), DeepseekV3Config(**TINY))
    unsettled.run()
    before = unsettled.model.state_dict()
    moved = {name for name, value in weights.items() if not torch.equal(before[name], value)}
    assert moved == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2)}
    for name in moved:
        # three steps of 0.001 up, down or neither
        assert bool(((weights[name] - before[name]).abs() < 0.003 + 1e-6).all())


def test_a_state_of_another_configuration_is_refused(text: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.pt"
    Trainer(Corpus.read(text), TRAIN, DeepseekV3Config(**TINY)).save(state)
    other = Trainer(Corpus.read(text), replace(TRAIN, steps=3), DeepseekV3Config(**TINY))
    with pytest.raises(ConfigError, match=r"was saved with .*'steps': 2.*, not .*'steps': 3"):
        other.resume(state)


def test_a_text_shorter_than_a_sequence_is_refused() -> None:
    short = Corpus(torch.zeros(99), torch.zeros(16))
    with pytest.raises(ConfigError, match=r"has 16 bytes, but one sequence needs 17"):
        Trainer(short, TRAIN, DeepseekV3Config(**TINY))


def test_a_training_of_no_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"steps must be at least 1, got 0"):
        TrainConfig(steps=0)
