"""transformers' own models, filled by this library's reader.

``load_client`` leaves the routed experts to the servers, ``load_local`` brings them along as the
baseline. Both build the model without memory, take the weights from the checkpoint one tensor at a
time, and account for every tensor.

Shapes: ``E`` experts, ``D`` hidden size, ``I`` width of one expert.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_eaas.errors import CheckpointError, ConfigError
from torch_eaas.models.accounting import check_tensors
from torch_eaas.models.checkpoint import CONFIG, SCALE_SUFFIX, Checkpoint
from torch_eaas.models.family import Family, MoeShape
from torch_eaas.models.moe import find_family, read_shape
from torch_eaas.remote_moe import RemoteExperts
from torch_eaas.remote_ops import RemoteClient

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

MIN_TRANSFORMERS = (5, 7)
"""From here on any experts implementation may be registered."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In which a model may run."""

GENERATION_CONFIG = "generation_config.json"

_NOT_OURS = ("quantization_config", "auto_map", "torch_dtype", "dtype")
"""Keys of ``config.json`` that would make transformers dequantise, cast or run the repo's code."""


def load_client(
    path: str | Path, client: RemoteClient, *, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Load everything but the routed experts, which ``client`` asks servers for.

    The result is transformers' own model for inference: ``generate`` works as ever. No byte of a
    routed expert is read and no memory is taken for one.

    Args:
        path: The checkpoint's directory.
        client: Whom the experts are asked of, a ``Client`` or a ``DeviceClient``, whose
            ``max_tokens`` bounds the tokens of a forward pass: a whole prompt, in ``generate``,
            unless ``prefill_chunk_size`` is less. The caller owns and closes it.
        dtype: Of all weights but the routers', which stay fp32.

    Raises:
        ConfigError: If the model is not known, the client is one for other sizes, or transformers
            is missing.
        CheckpointError: If the checkpoint is broken, or a tensor missing, unexpected or of the
            wrong shape.
    """
    with Checkpoint(path) as checkpoint:
        family, shape = find_family(checkpoint.config), read_shape(checkpoint)
        if client.config.hidden_size != shape.hidden_size:
            raise ConfigError(
                f"the model has hidden_size {shape.hidden_size}, its client "
                f"{client.config.hidden_size}; give the client the model's hidden_size"
            )
        model = _build(checkpoint, dtype, "eager")
        for layer in shape.moe_layers:
            experts = RemoteExperts(
                client, layer=layer, num_experts=shape.num_experts, top_k=shape.top_k
            )
            model.set_submodule(family.experts.format(layer=layer), experts)
        remote = family.expert_shapes(shape, shape.moe_layers)
        wanted, tied = _wanted(model)
        _account(checkpoint, family, wanted, {*tied, *remote, *(k + SCALE_SUFFIX for k in remote)})
        return _finish(model, checkpoint, _read(checkpoint, family, wanted, dtype))


def load_local(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    experts_implementation: str = "eager",
) -> PreTrainedModel:
    """Load the whole model into this process; what remote experts are compared with.

    Args:
        path: The checkpoint's directory.
        dtype: Of all weights but the routers', which stay fp32.
        experts_implementation: How transformers runs the experts.

    Raises:
        ConfigError: If the model is not known or transformers is missing.
        CheckpointError: If the checkpoint is broken, or a tensor missing, unexpected or of the
            wrong shape.
    """
    with Checkpoint(path) as checkpoint:
        family, shape = find_family(checkpoint.config), read_shape(checkpoint)
        model = _build(checkpoint, dtype, experts_implementation)
        prefixes = tuple(f"{family.experts.format(layer=layer)}." for layer in shape.moe_layers)
        wanted, tied = _wanted(model)
        wanted = {k: v for k, v in wanted.items() if not k.startswith(prefixes)}
        experts = family.expert_shapes(shape, shape.moe_layers)
        _account(checkpoint, family, {**wanted, **experts}, tied)
        tensors = _read(checkpoint, family, wanted, dtype)
        for layer in shape.moe_layers:
            tensors |= _fuse_experts(checkpoint, family, shape, layer, dtype)
        return _finish(model, checkpoint, tensors)


def _transformers() -> Any:
    """Return the module, whose types are not checked."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "loading a model needs transformers; run: pip install 'torch-eaas[hf]'"
        ) from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < MIN_TRANSFORMERS:
        raise ConfigError(
            f"transformers must be at least {'.'.join(map(str, MIN_TRANSFORMERS))}, "
            f"got {transformers.__version__}; run: pip install 'torch-eaas[hf]'"
        )
    return transformers


def _build(checkpoint: Checkpoint, dtype: torch.dtype, experts: str) -> PreTrainedModel:
    """Build the model on the meta device, where no tensor has memory."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    transformers = _transformers()
    settings = {k: v for k, v in checkpoint.config.items() if k not in _NOT_OURS}
    try:
        config = transformers.AutoConfig.for_model(**settings)
        with torch.device("meta"):
            model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, experts_implementation=experts
            )
    # its own errors and those of its config's checks have no common base
    except Exception as error:
        raise ConfigError(
            f"{checkpoint.path / CONFIG}: transformers cannot build this model: {error}"
        ) from error
    return model


def _wanted(model: PreTrainedModel) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return name and shape of what a checkpoint must hold, and the names tied to those."""
    seen: dict[int, str] = {}
    wanted, tied = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if seen.setdefault(id(tensor), name) == name:
            wanted[name] = tuple(tensor.shape)
        else:
            tied.add(name)
    return wanted, tied


def _account(
    checkpoint: Checkpoint,
    family: Family,
    expected: Mapping[str, tuple[int, ...]],
    allowed: set[str],
) -> None:
    """Check that every tensor of the checkpoint is expected, or known to be of no use here."""
    mtp = {name: family.mtp_layer(name, checkpoint.config) for name in checkpoint.names}
    extra = {name for name, layer in mtp.items() if layer is not None}
    old = {name for name in checkpoint.names if name.endswith(family.ignored)}
    check_tensors(checkpoint, expected, allowed | extra | old)
    if extra:
        layers = sorted({layer for layer in mtp.values() if layer is not None})
        logger.info(
            "MTP layer(s) %s skipped (num_nextn_predict_layers=%s)",
            ", ".join(map(str, layers)),
            checkpoint.config.get("num_nextn_predict_layers"),
        )


def _read(
    checkpoint: Checkpoint, family: Family, names: Iterable[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    return {
        name: checkpoint.read_weight(name, torch.float32 if name.endswith(family.fp32) else dtype)
        for name in names
    }


def _fuse_experts(
    checkpoint: Checkpoint, family: Family, shape: MoeShape, layer: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Read a layer's experts into transformers' layout: gate above up, all experts in one."""
    size_I = shape.intermediate_size
    gate_up_EID = torch.empty(shape.num_experts, 2 * size_I, shape.hidden_size, dtype=dtype)
    down_EDI = torch.empty(shape.num_experts, shape.hidden_size, size_I, dtype=dtype)
    for expert in range(shape.num_experts):
        gate, up, down = family.expert_names(layer, expert)
        gate_up_EID[expert, :size_I] = checkpoint.read_weight(gate, dtype)
        gate_up_EID[expert, size_I:] = checkpoint.read_weight(up, dtype)
        down_EDI[expert] = checkpoint.read_weight(down, dtype)
    prefix = family.experts.format(layer=layer)
    return {f"{prefix}.gate_up_proj": gate_up_EID, f"{prefix}.down_proj": down_EDI}


def _finish(
    model: PreTrainedModel, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]
) -> PreTrainedModel:
    """Put the tensors in, and make what no checkpoint holds."""
    # what is tied is missing here, and tied again below; the accounting was strict
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    # buffers that are computed, not stored (rotary frequencies), are still without memory
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            model.set_submodule(name, type(module)(model.config))
    empty = [name for name, tensor in _all_tensors(model) if tensor.is_meta]
    if empty:
        raise ConfigError(f"this version of transformers has tensors not known here: {empty}")
    if (checkpoint.path / GENERATION_CONFIG).exists():
        model.generation_config = _read_generation_config(checkpoint.path)
    # gradients end at remote experts, so none are kept anywhere
    model.name_or_path = str(checkpoint.path)
    model.requires_grad_(False)
    model.train(False)
    return model


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _read_generation_config(path: Path) -> Any:
    try:
        return _transformers().GenerationConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path / GENERATION_CONFIG}: cannot be used: {error}") from error
