"""The process behind ``torch-eaas server``: read some experts, serve them, drain at a signal."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from torch_eaas.access import Access
from torch_eaas.config import Combine, ReplyDtype, ServerConfig, Storage, WireDtype
from torch_eaas.errors import CheckpointError, ConfigError
from torch_eaas.experts import ExpertPool
from torch_eaas.models.checkpoint import SCALE_SUFFIX, Checkpoint
from torch_eaas.models.family import MoeShape
from torch_eaas.models.moe import find_family, read_experts, read_shape
from torch_eaas.monitor.announcement import ModelInfo
from torch_eaas.placement import Holdings, holdings_from, share
from torch_eaas.server import ExpertServer
from torch_eaas.server_loading import Load

if TYPE_CHECKING:
    from torch_eaas.device.expert_slab import ExpertSlab
    from torch_eaas.device.server import DeviceServer

_READ_TOGETHER = 16
"""Experts that are in memory twice while they are read: as stored, and as the pool keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """What a device's work is captured for, as clients name it in their ``ClientConfig``."""

    max_tokens: int = 128
    """Most tokens of a request."""

    max_micro_batches: int = 3
    """Most dispatches of a client at once."""

    max_clients: int = 64
    """Most clients at once."""

    wire_dtype: WireDtype = "fp32"
    """Format of hidden states."""

    reply_dtype: ReplyDtype = "fp32"
    """Format of the answers' rows."""

    combine: Combine = "partial"
    """Who adds up a token's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What one server process serves, and how."""

    checkpoint: Path
    """The checkpoint's directory."""

    monitor: str | None
    """The monitor's URL, if there is one."""

    share: tuple[int, int]
    """Index and count of servers among which the experts are dealt."""

    copies: int
    """Servers that hold each expert."""

    experts: tuple[int, ...] | None
    """The experts of every layer, instead of a share; empty for a standby."""

    room: int | None
    """Most experts to load when the monitor asks; None: all for a standby, else none."""

    storage: Storage
    """How weights are kept."""

    name: str
    """Unique among the servers."""

    address: str
    """Control endpoint; empty for any."""

    transport: str
    """The transport's name, or auto."""

    max_rows: int
    """Most rows of one batch."""

    threads: int
    """Threads of the experts."""

    trace: Path | None
    """Where to write a profiler's trace at the end; None: record none."""

    device: str | None
    """The device that answers by itself; None: the host answers."""

    pairs: PairOptions
    """What a device's work is captured for."""

    access: Access
    """The token that clients must show, and what the monitor is shown."""


def serve(options: ServeOptions) -> int:
    """Serve until a drain has ended; return the exit code."""
    torch.set_num_threads(options.threads)
    started = time.monotonic()
    with Checkpoint(options.checkpoint) as checkpoint:
        shape = read_shape(checkpoint)
        holdings = _holdings(options, shape)
        experts = make_experts(options, shape, holdings)
        _read_into(experts, checkpoint, holdings, options.storage)
        told = {
            "bytes_read": checkpoint.bytes_read,
            "bytes_held": sum(_sizes(checkpoint, holdings)),
            "header_bytes": checkpoint.header_bytes_read,
            "load_seconds": round(time.monotonic() - started, 3),
        }
    server = make_server(options, shape, experts)
    _drain_on_signals(server)
    # what is alive now stays so: a full collection would only stop the server to find that out
    gc.freeze()
    print(json.dumps({**_identity(server), **told}), flush=True)
    with _recorded(options.trace):
        server.serve()
    return 0


def make_experts(
    options: ServeOptions, shape: MoeShape, holdings: Holdings
) -> ExpertPool | ExpertSlab:
    """Return what experts are to be loaded into, still empty."""
    if options.device is None:
        return ExpertPool(shape.hidden_size, shape.intermediate_size, storage=options.storage)
    # only here, for it brings Triton, which not every machine has
    from torch_eaas.cli.device_serving import make_slab

    slots = sum(len(experts) for experts in holdings.values()) + _room(options, shape)
    return make_slab(options.device, shape, slots, options.storage)


def make_server(
    options: ServeOptions, shape: MoeShape, experts: ExpertPool | ExpertSlab
) -> ExpertServer | DeviceServer:
    """Return a server of these experts, which nobody has asked to serve yet."""
    # the storage too: holders of one expert must give the same bits where a client asks for that
    fingerprint = f"{shape.fingerprint}:{options.storage}"
    config = ServerConfig(
        name=options.name,
        address=options.address,
        max_rows=options.max_rows,
        max_pairs=options.pairs.max_clients,
        room=_room(options, shape),
        fingerprint=fingerprint,
        access=options.access,
    )
    model = ModelInfo(
        fingerprint=fingerprint, layers=shape.moe_layers, num_experts=shape.num_experts
    )
    load, monitor = _loader(options, shape, experts), options.monitor
    if isinstance(experts, ExpertPool):
        return ExpertServer(
            experts,
            config,
            transport=options.transport,
            monitor=monitor,
            model=model,
            load=load,
        )
    from torch_eaas.cli.device_serving import make_device_server

    return make_device_server(
        experts,
        shape,
        options.pairs,
        config,
        transport=options.transport,
        monitor=monitor,
        model=model,
        load=load,
    )


@contextmanager
def _recorded(trace: Path | None) -> Iterator[None]:
    """Write a profiler's trace of what happens meanwhile, if a file is given."""
    if trace is None:
        yield
        return
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        yield
    profiler.export_chrome_trace(str(trace))


def _holdings(options: ServeOptions, shape: MoeShape) -> Holdings:
    if options.experts is None:
        index, count = options.share
        return share(shape.moe_layers, shape.num_experts, index, count, copies=options.copies)
    if not options.experts:
        return {}
    if options.experts[-1] >= shape.num_experts:
        raise ConfigError(
            f"the checkpoint's layers have experts 0 to {shape.num_experts - 1}, "
            f"got {options.experts[-1]}"
        )
    return dict.fromkeys(shape.moe_layers, options.experts)


def _room(options: ServeOptions, shape: MoeShape) -> int:
    if options.room is not None:
        return options.room
    is_standby = options.experts == ()
    return len(shape.moe_layers) * shape.num_experts if is_standby else 0


def _loader(options: ServeOptions, shape: MoeShape, held: ExpertPool | ExpertSlab) -> Load:
    def load(experts: Sequence[tuple[int, int]]) -> None:
        # opened anew: no file is kept open for a load that may never come
        with Checkpoint(options.checkpoint) as checkpoint:
            now = read_shape(checkpoint).fingerprint
            if now != shape.fingerprint:
                raise CheckpointError(
                    f"{options.checkpoint}: is now model {now}, this server serves "
                    f"{shape.fingerprint}; start a server of the new one"
                )
            _read_into(held, checkpoint, holdings_from(experts), options.storage)

    return load


def _read_into(
    held: ExpertPool | ExpertSlab, checkpoint: Checkpoint, holdings: Holdings, storage: Storage
) -> None:
    for layer, experts in holdings.items():
        for at in range(0, len(experts), _READ_TOGETHER):
            some = experts[at : at + _READ_TOGETHER]
            read = read_experts(checkpoint, layer, some, storage=storage)
            held.update({(layer, expert): weights for expert, weights in read})


def _sizes(checkpoint: Checkpoint, holdings: Holdings) -> Iterator[int]:
    """Yield the size in the checkpoint of each tensor that belongs to a held expert."""
    family = find_family(checkpoint.config)
    for layer, experts in holdings.items():
        for expert in experts:
            for name in family.expert_names(layer, expert):
                for tensor in (name, name + SCALE_SUFFIX):
                    if tensor in checkpoint.names:
                        yield checkpoint.info(tensor).num_bytes


def _identity(server: ExpertServer | DeviceServer) -> Mapping[str, object]:
    return {
        "ready": "server",
        "name": server.config.name,
        "address": server.address,
        "pid": os.getpid(),
        "instance": f"{server.instance:016x}",
        "fingerprint": server.config.fingerprint,
        "experts": {str(layer): list(ids) for layer, ids in server.experts.holdings.items()},
    }


def _drain_on_signals(server: ExpertServer | DeviceServer) -> None:
    """Drain at the first SIGTERM or SIGINT; the second one ends the process at once."""

    def drain(number: int, frame: FrameType | None) -> None:
        # from here on the kernel acts, also while a native call keeps Python from running
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        server.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)
