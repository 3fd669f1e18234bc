"""What a server needs of a checkpoint: the experts' sizes, and the weights of some of them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from torch_eaas.config import Storage, check_choice
from torch_eaas.errors import CheckpointError, ConfigError
from torch_eaas.experts import ExpertWeights
from torch_eaas.models.checkpoint import Checkpoint
from torch_eaas.models.deepseek import DEEPSEEK_V3
from torch_eaas.models.family import Family, MoeShape

FAMILIES = {"deepseek_v3": DEEPSEEK_V3}
"""The models that can be loaded, by their config's ``model_type``."""


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family that a model's config names.

    Raises:
        ConfigError: If its ``model_type`` is not known.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not known, known are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def read_shape(checkpoint: Checkpoint) -> MoeShape:
    """Return the sizes of a checkpoint's routed experts; reads no tensor."""
    family = find_family(checkpoint.config)
    return family.read_shape(checkpoint.config, checkpoint.fingerprint)


def read_experts(
    checkpoint: Checkpoint, layer: int, experts: Iterable[int], *, storage: Storage
) -> Iterator[tuple[int, ExpertWeights]]:
    """Read some experts of one layer, one after the other, and no other bytes.

    Args:
        checkpoint: The checkpoint; it must stay open while the experts are taken.
        layer: The layer, by the model's own count.
        experts: Which of its experts.
        storage: ``fp32`` and ``bf16`` undo a checkpoint's FP8; ``fp8`` hands FP8 weights and
            their scales on as they are, and quantizes others.

    Returns:
        Pairs of an expert's id and its weights, in the order asked for; each pair is read when
        it is taken.

    Raises:
        ConfigError: If the layer or an expert does not exist.
        CheckpointError: If a tensor is missing or has the wrong shape.
    """
    check_choice("storage", storage, Storage)
    family = find_family(checkpoint.config)
    shape = read_shape(checkpoint)
    if layer not in shape.moe_layers:
        first, last = shape.moe_layers[0], shape.moe_layers[-1]
        raise ConfigError(f"layer {layer} has no experts; layers {first} to {last} have")
    wanted = tuple(experts)
    for expert in wanted:
        if not 0 <= expert < shape.num_experts:
            raise ConfigError(
                f"layer {layer} has no expert {expert}; it has 0 to {shape.num_experts - 1}"
            )
    return (
        (expert, _read_expert(checkpoint, shape, family.expert_names(layer, expert), storage))
        for expert in wanted
    )


def _read_expert(
    checkpoint: Checkpoint, shape: MoeShape, names: tuple[str, str, str], storage: Storage
) -> ExpertWeights:
    wide = (shape.intermediate_size, shape.hidden_size)
    for name, expected in zip(names, (wide, wide, wide[::-1]), strict=True):
        info = checkpoint.info(name)
        if info.shape != expected:
            raise CheckpointError(
                f"{checkpoint.where(name)}: has shape {info.shape}, expected {expected}"
            )
    fp8 = storage == "fp8"
    if fp8 and checkpoint.info(names[0]).dtype == torch.float8_e4m3fn:
        (gate, gate_scale), (up, up_scale), (down, down_scale) = map(checkpoint.read_blocks, names)
        scales = (gate_scale, up_scale, down_scale)
        return ExpertWeights(gate, up, down, scales, checkpoint.block)
    dtype = torch.bfloat16 if storage == "bf16" else torch.float32
    gate, up, down = (checkpoint.read_weight(name, dtype) for name in names)
    weights = ExpertWeights(gate, up, down)
    return weights.quantized() if fp8 else weights
