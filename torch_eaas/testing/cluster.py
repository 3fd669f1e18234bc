"""Clusters within one process: servers in threads, and clients of theirs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Self, TypeVar

from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig, MonitorConfig, ServerConfig, Storage
from torch_eaas.device.client import DeviceClient
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.device.server import DeviceServer
from torch_eaas.errors import ConfigError
from torch_eaas.experts import ExpertPool
from torch_eaas.monitor.announcement import ModelInfo
from torch_eaas.monitor.app import serve_in_background
from torch_eaas.placement import Holdings, pairs_of, share
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.server import ExpertServer
from torch_eaas.testing.experts import Weights
from torch_eaas.testing.faults import FaultPlan

AnyClient = TypeVar("AnyClient", Client, DeviceClient)

PAIRS_S = 5.0
"""How long a new client waits for its pairs; a fault may keep one closed."""


class LocalCluster:
    """Servers in threads of this process, and clients of theirs; a context manager.

    Args:
        weights: All experts. Each layer must have the experts 0 to E - 1.
        servers: How many servers share them.
        copies: Servers that hold each expert.
        storage: How they keep the weights.
        transport: How clients reach them; the default is loopback.
        plan: What is to go wrong.
        standbys: Servers that hold nothing at first and load what the monitor asks for.
        monitor: Run a monitor in the cluster, with these options; standbys need one.
        on_device: Run device servers, on the CPU, for clients with these options. Where machines
            are busy, give them a ``graph_wait`` of seconds.

    Raises:
        ConfigError: Standbys without a monitor, or planned faults of device servers.

    Example::

        weights = random_experts(64, 32, layers=[0], num_experts=8, seed=0)
        with LocalCluster(weights, servers=3, copies=2) as cluster:
            client = cluster.client(top_k=2)
            experts = RemoteExperts(client, layer=0, num_experts=8, top_k=2)
            cluster.kill(0)
    """

    def __init__(
        self,
        weights: Weights,
        *,
        servers: int = 3,
        copies: int = 1,
        storage: Storage = "fp32",
        transport: Transport | None = None,
        plan: FaultPlan | None = None,
        standbys: int = 0,
        monitor: MonitorConfig | None = None,
        on_device: ClientConfig | None = None,
    ) -> None:
        if standbys and monitor is None:
            raise ConfigError("standbys load what a monitor asks for; give monitor=MonitorConfig()")
        if plan is not None and on_device is not None:
            raise ConfigError(
                "a plan makes host-driven servers fail; kill() ends a device server, or leave "
                "on_device out"
            )
        self.transport = transport or LoopbackTransport()
        self._plan = plan
        self.layers = sorted({layer for layer, _ in weights})
        self.num_experts = 1 + max(expert for _, expert in weights)
        self.intermediate_size, self.hidden_size = next(iter(weights.values())).gate_ID.shape
        self._stack = ExitStack()
        self._killed: set[int] = set()
        self._weights, self._storage, self._on_device = weights, storage, on_device
        self.monitor_url: str | None = None
        """The monitor's URL, if one runs."""
        if monitor is not None:
            self.monitor_url = self._stack.enter_context(serve_in_background(monitor)).url
        held: list[Holdings] = [
            share(self.layers, self.num_experts, index, servers, copies=copies)
            for index in range(servers)
        ]
        # the standbys come last, so that indices mean what they mean without them
        held += [{}] * standbys
        self.servers = [self._server(i, holdings) for i, holdings in enumerate(held)]

    def client(self, *, top_k: int, **options: Any) -> Client:
        """Return a client with a pair to every live server; it closes with the cluster.

        Args:
            top_k: Experts per token.
            options: More fields of ``ClientConfig``; device servers must have been given the same.
        """
        config = ClientConfig(hidden_size=self.hidden_size, top_k=top_k, **options)
        return self._opened(Client(config, **self._reached()))

    def device_client(self, config: ClientConfig | None = None, **options: Any) -> DeviceClient:
        """Return a client whose requests are kernels, or their twins: like ``client``.

        Args:
            config: Its options; by default those that the cluster has ``on_device``.
            options: More of ``DeviceClient``: ``max_servers``, ``max_replicas``.

        Raises:
            ConfigError: There are no options.
        """
        config = config or self._on_device
        if config is None:
            raise ConfigError("device_client needs a config, or the cluster on_device=config")
        return self._opened(DeviceClient(config, **self._reached(), **options))

    def kill(self, index: int) -> None:
        """End a server as SIGKILL would: what waits for it is not answered.

        A batch that it runs at this moment still ends, since a thread cannot be killed.
        """
        if index not in self._killed:
            self._killed.add(index)
            server = self.servers[index]
            if server._agent is not None:
                # the dead do not say that they leave: the monitor has to wait for the lease
                server._agent.close(leave=False)
            # the pairs end before the loop does, so that it finds nobody left to answer
            server._listener.close()
            server.close()

    def close(self) -> None:
        """Close all clients and servers; safe twice."""
        if self._plan is not None:
            self._plan.end()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _reached(self) -> dict[str, Any]:
        """Return how a client reaches the live servers."""
        addresses = [s.address for i, s in enumerate(self.servers) if i not in self._killed]
        if self.monitor_url is not None:
            addresses = []
        return {
            "servers": addresses,
            "monitor": self.monitor_url,
            "transport": self.transport,
        }

    def _opened(self, client: AnyClient) -> AnyClient:
        """Give all pairs time to open: a client is ready as soon as each expert has one holder."""
        self._stack.enter_context(client)
        client.wait_ready(self.layers, self.num_experts)
        deadline = time.monotonic() + PAIRS_S
        while client._connections.closed and time.monotonic() < deadline:
            time.sleep(0.001)
        return client

    def _server(self, index: int, holdings: Holdings) -> ExpertServer | DeviceServer:
        experts = self._no_experts()

        def load(pairs: Iterable[tuple[int, int]]) -> None:
            experts.update({pair: self._weights[pair] for pair in pairs})

        load(pairs_of(holdings))
        room = 0 if holdings else len(self._weights)
        config = ServerConfig(name=f"server-{index}", room=room)
        member: dict[str, Any] = {
            "transport": self.transport,
            "monitor": self.monitor_url,
            "model": ModelInfo(
                fingerprint="", layers=tuple(self.layers), num_experts=self.num_experts
            ),
            "load": load,
        }
        server: ExpertServer | DeviceServer
        if isinstance(experts, ExpertSlab):
            assert self._on_device is not None
            server = DeviceServer(experts, PairSpec.of(self._on_device), config, **member)
        else:
            server = ExpertServer(experts, config, **member)
            if self._plan is not None:
                self._plan.attach(server, index)
        self._stack.enter_context(server)
        return server.serve_in_background()

    def _no_experts(self) -> ExpertPool | ExpertSlab:
        """Return what a server holds before it has loaded anything."""
        sizes = (self.hidden_size, self.intermediate_size)
        if self._on_device is None:
            return ExpertPool(*sizes, storage=self._storage)
        return ExpertSlab(
            *sizes,
            slots=len(self._weights),
            max_layers=max(self.layers) + 1,
            max_experts=self.num_experts,
            storage=self._storage,
            device="cpu",
        )
