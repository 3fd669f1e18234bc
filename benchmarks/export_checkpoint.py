"""Write a trained DeepSeek-V3 model as DeepSeek-R1 lies on the hub, and read it back.

On disk every expert has tensors of its own, the linears of attention and MLPs are FP8 with a
``weight_scale_inv`` beside them, the rest is bfloat16, and the tensors are dealt out to several
shards that an index lists. One more layer follows the model's own: the multi-token prediction (MTP)
layer. Here nobody trained it; it holds initial values and copies of the embedding and the head.

The hub's own files sometimes have a weight in one shard and its scale in the next one. Here that
happens on purpose, to every ``down_proj``.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from torch_eaas.ops.quantize import dequantize_blocks, quantize_blocks

BLOCK = (128, 128)
NUM_SHARDS = 4
INDEX = "model.safetensors.index.json"
SCALE = "_scale_inv"
FUSED = ".mlp.experts."

# what transformers writes into a config.json and DeepSeek-R1's does not have
NOT_IN_R1 = {
    "dtype",
    "head_dim",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "qk_head_dim",
    "rope_interleave",
    "rope_parameters",
    "transformers_version",
}


def write_checkpoint(model: DeepseekV3ForCausalLM, folder: Path) -> None:
    """Write config, shards and index; files of these names are replaced.

    Args:
        model: The trained model, which stays as it is.
        folder: Where to write; made if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = split_experts(model.state_dict()) | mtp_tensors(model)
    stored = encode(tensors)
    weight_map = deal(stored)
    for file in sorted(set(weight_map.values())):
        shard = {name: stored[name] for name in stored if weight_map[name] == file}
        save_file(shard, folder / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in stored.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", config_json(model.config))
    _write_json(folder / "generation_config.json", {"do_sample": False, "max_new_tokens": 256})


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Read every tensor that the index names, FP8 ones brought back to fp32."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    stored: dict[str, Tensor] = {}
    for file in set(weight_map.values()):
        with safe_open(folder / file, framework="pt") as shard:
            stored |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return {
        name: dequantize_blocks(tensor, stored[name + SCALE], BLOCK)
        if name + SCALE in stored
        else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith(SCALE)
    }


def load_checkpoint(folder: Path, model: DeepseekV3ForCausalLM) -> None:
    """Replace a model's weights by those of a folder, all but the MTP layer's."""
    mtp = f"model.layers.{model.config.num_hidden_layers}."
    tensors = read_checkpoint(folder)
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(mtp)}
    model.load_state_dict(join_experts(own, model.config))


def split_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give every expert tensors of its own, as on the hub.

    Example:
        ``mlp.experts.gate_up_proj``, ``(16, 144, 144)``, gives ``mlp.experts.0.gate_proj.weight``
        and ``mlp.experts.0.up_proj.weight``, both ``(72, 144)``, and so on for 16 experts.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        prefix, fused, kind = name.partition(FUSED)
        if not fused:
            tensors[name] = value
            continue
        for expert, weight in enumerate(value):
            parts = zip(kind.split("_")[:-1], weight.chunk(kind.count("_")), strict=True)
            for part, piece in parts:
                tensors[f"{prefix}{FUSED}{expert}.{part}_proj.weight"] = piece
    return tensors


def join_experts(tensors: dict[str, Tensor], config: DeepseekV3Config) -> dict[str, Tensor]:
    """Undo :func:`split_experts`: one stacked tensor for all experts of a layer."""
    state = {name: value for name, value in tensors.items() if FUSED not in name}
    for layer in range(config.first_k_dense_replace or 0, config.num_hidden_layers):
        prefix = f"model.layers.{layer}{FUSED}"
        weights = [
            [tensors[f"{prefix}{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            for expert in range(config.n_routed_experts)
        ]
        state[prefix + "gate_up_proj"] = torch.stack([torch.cat(gud[:2]) for gud in weights])
        state[prefix + "down_proj"] = torch.stack([gud[2] for gud in weights])
    return state


def mtp_tensors(model: DeepseekV3ForCausalLM) -> dict[str, Tensor]:
    """Return the MTP layer's tensors: initial values, and copies of the embedding and the head."""
    config = model.config
    prefix = f"model.layers.{config.num_hidden_layers}."
    deeper = config.to_dict() | {"num_hidden_layers": config.num_hidden_layers + 1}
    with torch.random.fork_rng():
        torch.manual_seed(config.num_hidden_layers)
        state = DeepseekV3ForCausalLM(DeepseekV3Config(**deeper)).state_dict()
        joint = torch.randn(config.hidden_size, 2 * config.hidden_size) * config.initializer_range
    layer = {name: value for name, value in state.items() if name.startswith(prefix)}
    return split_experts(layer) | {
        prefix + "enorm.weight": torch.ones(config.hidden_size),
        prefix + "hnorm.weight": torch.ones(config.hidden_size),
        prefix + "eh_proj.weight": joint,
        prefix + "embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
        prefix + "shared_head.norm.weight": torch.ones(config.hidden_size),
        prefix + "shared_head.head.weight": model.lm_head.weight.detach().clone(),
    }


def is_fp8(name: str) -> bool:
    """Say whether a tensor is stored as FP8: the linears of attention and MLPs are, routers not."""
    return (".self_attn." in name or ".mlp." in name) and name.endswith(
        ("_proj.weight", "_mqa.weight")
    )


def encode(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Bring each tensor into the dtype that it has on disk, FP8 ones with their scales."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_fp8(name):
            stored[name], stored[name + SCALE] = quantize_blocks(tensor, BLOCK)
        elif name.endswith("e_score_correction_bias"):
            stored[name] = tensor.float()
        else:
            stored[name] = tensor.bfloat16()
    return stored


def deal(stored: dict[str, Tensor]) -> dict[str, str]:
    """Deal tensors out to shards of about equal bytes, in order.

    Each ``down_proj``'s scale goes one shard further than its weight.
    """
    total, before = sum(tensor.nbytes for tensor in stored.values()), 0
    weight_map: dict[str, str] = {}
    for name, tensor in stored.items():
        shard = before * NUM_SHARDS // total
        if name.endswith("down_proj.weight" + SCALE):
            shard = (shard + 1) % NUM_SHARDS
        weight_map[name] = f"model-{shard + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        before += tensor.nbytes
    return weight_map


def config_json(config: DeepseekV3Config) -> dict[str, Any]:
    """Return a config.json with DeepSeek-R1's keys, less those for its own Python files."""
    own = {key: value for key, value in config.to_diff_dict().items() if key not in NOT_IN_R1}
    added = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "ep_size": 1,
        "moe_layer_freq": 1,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(BLOCK),
        },
        "rope_scaling": None,
        "rope_theta": (config.rope_parameters or {})["rope_theta"],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
    }
    return dict(sorted((own | added).items()))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")
