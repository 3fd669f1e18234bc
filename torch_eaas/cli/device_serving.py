"""What ``torch-eaas server --device`` makes: a slab on a device, and a server that runs it."""

from __future__ import annotations

from torch_eaas.cli.serving import PairOptions
from torch_eaas.config import ServerConfig, Storage
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.device.server import DeviceServer
from torch_eaas.models.family import MoeShape
from torch_eaas.monitor.announcement import ModelInfo
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.server_loading import Load


def make_slab(device: str, shape: MoeShape, slots: int, storage: Storage) -> ExpertSlab:
    """Return an empty slab for some experts of a checkpoint."""
    return ExpertSlab(
        shape.hidden_size,
        shape.intermediate_size,
        slots=slots,
        max_layers=max(shape.moe_layers) + 1,
        max_experts=shape.num_experts,
        storage=storage,
        device=device,
    )


def make_device_server(
    slab: ExpertSlab,
    shape: MoeShape,
    pairs: PairOptions,
    config: ServerConfig,
    *,
    transport: str,
    monitor: str | None,
    model: ModelInfo,
    load: Load,
) -> DeviceServer:
    """Return a server of a slab for the clients that the options describe."""
    spec = PairSpec(
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        # as a client counts them: one more, for a request that was given up
        slots=pairs.max_micro_batches + 1,
        max_tokens=pairs.max_tokens,
        wire_dtype=pairs.wire_dtype,
        reply_dtype=pairs.reply_dtype,
        combine=pairs.combine,
    )
    return DeviceServer(
        slab, spec, config, transport=transport, monitor=monitor, model=model, load=load
    )
