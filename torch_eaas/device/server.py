"""A server whose device does all of a request's work; the host only replays and keeps the books."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_eaas.comm.auto import transport_of
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ServerConfig
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.device.server_iteration import IterationSizes
from torch_eaas.device.server_pairs import DevicePair
from torch_eaas.device.server_path import DevicePath
from torch_eaas.errors import ConfigError
from torch_eaas.monitor.announcement import ModelInfo
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.server_base import Membership, Server
from torch_eaas.server_loading import Load

MAX_REQUESTS = 64


class DeviceServer(Server[DevicePair]):
    """Runs experts for any number of clients on one device, as ``ExpertServer`` does on the host.

    What its graph is captured for is fixed here, and a client that differs is refused: the spec,
    ``config.max_pairs``, ``config.max_rows`` and ``max_requests``. Pairs, experts, placement and
    drain change under the same graph. A batch that fails on a GPU ends the process with CUDA's
    error, since no later launch can succeed there; its clients go to other holders, and the
    launcher starts it anew.

    Args:
        slab: The experts; they may be added to and removed from while it serves.
        spec: What every client must agree on, ``PairSpec.of`` its config; a pair may have fewer
            slots and tokens.
        config: The server's options.
        max_requests: Most requests of one iteration.
        wait_us: How long an iteration waits for a request, in microseconds of the GPU.
        transport: How clients reach it: a transport whose windows the slab's device can use, the
            name of one, or ``"auto"``, which is the default.
        monitor: URL of the monitor to join, if any.
        model: The whole model that these experts belong to, told to the monitor.
        load: Adds experts that the monitor asks for; see ``ExpertServer``.
        instance: This life's id; by default a random one.
        clock: Seconds, monotonic; tests plan it.

    Raises:
        ConfigError: Sizes do not fit each other.

    Example::

        config = ClientConfig(hidden_size=7168, top_k=8, wire_dtype="bf16")
        server = DeviceServer(slab, PairSpec.of(config), transport=transport)
        with server.serve_in_background():
            client = DeviceClient(config, servers=[server.address], transport=transport)
    """

    experts: ExpertSlab

    def __init__(
        self,
        slab: ExpertSlab,
        spec: PairSpec,
        config: ServerConfig | None = None,
        *,
        max_requests: int = MAX_REQUESTS,
        wait_us: int = 50,
        transport: Transport | str | None = None,
        monitor: str | None = None,
        model: ModelInfo | None = None,
        load: Load | None = None,
        instance: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or ServerConfig()
        if spec.hidden_size != slab.hidden_size:
            raise ConfigError(
                f"the spec has hidden size {spec.hidden_size} and the slab {slab.hidden_size}; "
                f"both are the model's"
            )
        transport = transport_of(transport or "auto", device=str(slab.device))
        sizes = IterationSizes(
            spec=spec,
            max_pairs=config.max_pairs,
            max_rows=config.max_rows,
            max_requests=max_requests,
            wait_us=wait_us,
        )
        super().__init__(
            slab,
            DevicePath(slab, sizes, transport, clock),
            config,
            transport=transport,
            member=Membership(monitor=monitor, model=model, load=load, instance=instance),
            clock=clock,
        )
