"""DeepSeek-V3 and R1: their names, and the rules that this library takes for granted."""

import re
from collections.abc import Mapping
from typing import Any

from torch_eaas.errors import ConfigError
from torch_eaas.models.family import Family, MoeShape

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

_RULES = {
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Settings of which transformers or the servers know one value only; a config may lack them."""


def _read_shape(config: Mapping[str, Any], fingerprint: str) -> MoeShape:
    for name, value in _RULES.items():
        if config.get(name, value) != value:
            raise ConfigError(f"config.json: {name} must be {value!r}, got {config[name]!r}")
    first = _number(config, "first_k_dense_replace", 0)
    layers = _number(config, "num_hidden_layers", 1)
    if first >= layers:
        raise ConfigError(
            f"config.json: no layer has experts: first_k_dense_replace is {first} "
            f"and num_hidden_layers is {layers}"
        )
    return MoeShape(
        hidden_size=_number(config, "hidden_size", 1),
        intermediate_size=_number(config, "moe_intermediate_size", 1),
        moe_layers=tuple(range(first, layers)),
        num_experts=_number(config, "n_routed_experts", 1),
        top_k=_number(config, "num_experts_per_tok", 1),
        fingerprint=fingerprint,
    )


def _number(config: Mapping[str, Any], name: str, least: int) -> int:
    value = config.get(name)
    if type(value) is not int or value < least:
        raise ConfigError(
            f"config.json: {name} must be an integer of at least {least}, got {value!r}"
        )
    return value


def _mtp_layer(name: str, config: Mapping[str, Any]) -> int | None:
    """Multi-token prediction stands behind the last layer, wherever that is (61 in R1)."""
    found = _LAYER.match(name)
    layer = int(found[1]) if found else -1
    return layer if layer >= config["num_hidden_layers"] else None


DEEPSEEK_V3 = Family(
    experts="model.layers.{layer}.mlp.experts",
    projections=("gate_proj", "up_proj", "down_proj"),
    fp32=(".mlp.gate.weight", ".mlp.gate.e_score_correction_bias"),
    ignored=(".rotary_emb.inv_freq",),
    read_shape=_read_shape,
    mtp_layer=_mtp_layer,
)
"""``model_type`` deepseek_v3."""
