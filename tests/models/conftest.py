"""A tiny random DeepSeek-V3 checkpoint, written without any code of the library."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK = (128, 128)
# sizes that 128 does not divide; two shared experts, lest they have a routed expert's shape
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 144,
    "intermediate_size": 200,
    "kv_lora_rank": 112,
    "max_position_embeddings": 256,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 136,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 32,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 24,
    "vocab_size": 80,
}


@dataclass
class Tiny:
    """A checkpoint on disk and what it means."""

    path: Path
    config: dict[str, Any]
    stored: dict[str, Tensor]
    """Tensors as they are on disk."""
    files: dict[str, str]
    """Each tensor's file."""
    plain: dict[str, Tensor] = field(default_factory=dict)
    """Weights as fp32, scales applied; without the scales."""

    def ranges(self, name: str) -> tuple[str, int, int]:
        """Return a tensor's file, first byte and end, by the file's own header."""
        raw = (self.path / self.files[name]).read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        begin, end = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
        return self.files[name], 8 + length + begin, 8 + length + end


def layer_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    kv_rank, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
    wide = config["qk_nope_head_dim"] + config["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_a_proj": (q_rank, hidden),
        "self_attn.q_a_layernorm": (q_rank,),
        "self_attn.q_b_proj": (heads * head, q_rank),
        "self_attn.kv_a_proj_with_mqa": (kv_rank + config["qk_rope_head_dim"], hidden),
        "self_attn.kv_a_layernorm": (kv_rank,),
        "self_attn.kv_b_proj": (heads * wide, kv_rank),
        "self_attn.o_proj": (hidden, heads * config["v_head_dim"]),
    }
    parts = {"mlp": config["intermediate_size"]}
    if layer >= config["first_k_dense_replace"]:
        size, num_experts = config["moe_intermediate_size"], config["n_routed_experts"]
        parts = {f"mlp.experts.{e}": size for e in range(num_experts)}
        parts["mlp.shared_experts"] = size * config["n_shared_experts"]
        shapes["mlp.gate"] = (num_experts, hidden)
    for prefix, size in parts.items():
        shapes[f"{prefix}.gate_proj"] = shapes[f"{prefix}.up_proj"] = (size, hidden)
        shapes[f"{prefix}.down_proj"] = (hidden, size)
    if layer == config["num_hidden_layers"]:
        extra = ("enorm", "hnorm", "shared_head.norm")
        shapes |= dict.fromkeys(extra, (hidden,)) | {"eh_proj": (hidden, 2 * hidden)}
        head_and_tokens = ("embed_tokens", "shared_head.head")
        shapes |= dict.fromkeys(head_and_tokens, (config["vocab_size"], hidden))
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def all_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    last = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    for layer in range(last):
        shapes |= layer_shapes(config, layer)
    return shapes


def blocks(shape: tuple[int, int], block: tuple[int, int]) -> Iterator[tuple[int, int, Any]]:
    """Yield each block's place in the grid of scales and its slice of the weight."""
    for i, row in enumerate(range(0, shape[0], block[0])):
        for j, column in enumerate(range(0, shape[1], block[1])):
            yield i, j, (slice(row, row + block[0]), slice(column, column + block[1]))


def to_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    grid = tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    scale = torch.empty(grid)
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i, j, part in blocks(tuple(weight.shape), block):
        scale[i, j] = weight[part].abs().max() / 448
        stored[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return stored, scale


def from_fp8(stored: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    weight = torch.empty(stored.shape)
    for i, j, part in blocks(tuple(stored.shape), block):
        weight[part] = stored[part].float() * scale[i, j]
    return weight


def make_tensors(config: dict[str, Any], fp8: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors as stored and as meant."""
    generator = torch.Generator().manual_seed(3)
    stored, plain = {}, {}
    for name, shape in all_shapes(config).items():
        weight = torch.randn(shape, generator=generator) * 0.1 + (len(shape) == 1)
        if fp8 and "_proj" in name and "eh_proj" not in name:
            stored[name], stored[name + "_scale_inv"] = to_fp8(weight, BLOCK)
            plain[name] = from_fp8(stored[name], stored[name + "_scale_inv"], BLOCK)
        else:
            stored[name] = weight.bfloat16()
            plain[name] = stored[name].float()
        if name.endswith("mlp.gate.weight"):
            bias = name.replace("weight", "e_score_correction_bias")
            stored[bias] = plain[bias] = torch.randn(shape[0], generator=generator) * 0.1 + 7
    return stored, plain


def write(path: Path, config: dict[str, Any], stored: dict[str, Tensor]) -> dict[str, str]:
    """Write three shards: weights by turns into two, scales into the third."""
    scales = [name for name in stored if name.endswith("_scale_inv")]
    numbers = {name: 1 + turn % 2 for turn, name in enumerate(sorted(stored.keys() - scales))}
    numbers |= dict.fromkeys(scales, 3)
    files = {name: f"model-0000{number}-of-00003.safetensors" for name, number in numbers.items()}
    for file in set(files.values()):
        save_file({name: stored[name] for name in files if files[name] == file}, path / file)
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config))
    return files


MakeTiny = Callable[..., Tiny]


@pytest.fixture
def make_tiny(tmp_path: Path) -> MakeTiny:
    """Write a checkpoint; keywords change the config, ``edit`` the tensors on disk."""

    def make(
        *, fp8: bool = True, edit: Callable[[dict[str, Tensor]], Any] | None = None, **changes: Any
    ) -> Tiny:
        config = CONFIG | changes
        if not fp8:
            config.pop("quantization_config")
        stored, plain = make_tensors(config, fp8)
        if edit is not None:
            edit(stored)
        path = tmp_path / "tiny"
        path.mkdir(exist_ok=True)
        return Tiny(path, config, stored, write(path, config, stored), plain)

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The FP8 checkpoint that no test changes."""
    path = tmp_path_factory.mktemp("tiny")
    stored, plain = make_tensors(CONFIG, True)
    return Tiny(path, CONFIG, stored, write(path, CONFIG, stored), plain)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every read of a shard: file, first byte, end."""
    found: list[tuple[str, int, int]] = []
    preadv = os.preadv

    def recorded(fd: int, buffers: list[Any], offset: int, *flags: int) -> int:
        count = preadv(fd, buffers, offset, *flags)
        file = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        found.append((file, offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", recorded)
    return found
