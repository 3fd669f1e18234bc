"""Where a client learns of servers: from a monitor, or from the servers themselves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch_eaas.client_pairs import CONTROL_TIMEOUT_S
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig
from torch_eaas.connections import Connections
from torch_eaas.errors import AccessDenied, ConfigError, EaasError, PeerTimeout, TransportError
from torch_eaas.monitor.agent import MonitorAgent
from torch_eaas.monitor.announcement import Announcement
from torch_eaas.placement import Placement, ServerInfo

REASK_S = 0.5

logger = logging.getLogger(__name__)


class Directory:
    """Feeds a client's connections with placements.

    Args:
        connections: Told of every newer placement.
        transport: Reaches servers that are named by address.
        servers: Control addresses; each is asked what it holds.
        monitor: URL of a monitor; exactly one of ``servers`` and ``monitor`` is given.
        config: The client's options.
        instance: The client's instance id.
        counters: The client's counters, told to the monitor.
    """

    def __init__(
        self,
        connections: Connections[Any],
        transport: Transport,
        *,
        servers: Sequence[str],
        monitor: str | None,
        config: ClientConfig,
        instance: int,
        counters: Callable[[], dict[str, int]],
    ) -> None:
        if bool(servers) == (monitor is not None):
            raise ConfigError("a client takes either servers=[address, ...] or monitor=url")
        self._connections = connections
        self._transport = transport
        self._addresses = tuple(servers)
        self._known: dict[str, ServerInfo] = {}
        self._access = config.access
        self._asked_at = 0.0
        self._agent: MonitorAgent | None = None
        if monitor is not None:
            self._agent = MonitorAgent(
                monitor,
                lambda: Announcement(
                    role="client", name=config.name, instance=instance, counters=counters()
                ),
                connections.follow,
                access=config.access,
            )

    def refresh(self) -> None:
        """Learn now what there is; never raises for a peer that is away."""
        if self._agent is None:
            self._ask_servers()
        elif not self._agent.refresh(timedelta(seconds=CONTROL_TIMEOUT_S)):
            self._ask_for_placement(self._agent)

    def tend(self, *, is_wanted: bool = False) -> None:
        """Ask again where something is known to be out of date.

        Args:
            is_wanted: Whether somebody waits for a holder of an expert: without a monitor nobody
                tells that a server holds more by now.
        """
        if self._connections.placement_is_stale:
            self._connections.placement_is_stale = False
            self.refresh()
        if self._agent is not None or time.monotonic() - self._asked_at < REASK_S:
            return
        open_addresses = {conn.server.address for conn in self._connections.live.values()}
        if is_wanted or any(address not in open_addresses for address in self._addresses):
            self._ask_servers()

    def close(self) -> None:
        """Leave the monitor."""
        if self._agent is not None:
            self._agent.close()

    def _ask_servers(self) -> None:
        self._asked_at = time.monotonic()
        changed = False
        for address in self._addresses:
            server = self._ask(address)
            if server is not None and self._known.get(address) != server:
                self._known[address] = server
                changed = True
        if changed:
            servers = sorted(self._known.values(), key=lambda server: server.name)
            names = [server.name for server in servers]
            if len(set(names)) < len(names):
                raise ConfigError(f"each server needs a name of its own, got {names}")
            version = self._connections.placement.version + 1
            self._connections.follow(Placement(tuple(servers), version))

    def _ask_for_placement(self, agent: MonitorAgent) -> None:
        """Take the newest placement that a server knows: the monitor is away."""
        for conn in list(self._connections.live.values()):
            try:
                answer, _ = conn.link.call("placement", {}, timeout=CONTROL_TIMEOUT_S)
                placement = Placement.from_json(answer.get("placement", {}))
            except EaasError as error:
                conn.was_cut |= isinstance(error, PeerTimeout)
                logger.debug("no placement of server %s: %s", conn.name, error)
                continue
            agent.offer(placement)

    def _ask(self, address: str) -> ServerInfo | None:
        try:
            link = self._transport.dial(address, CONTROL_TIMEOUT_S, self._access)
            try:
                answer, _ = link.call("describe", {}, timeout=CONTROL_TIMEOUT_S)
            finally:
                link.close()
        except AccessDenied as error:
            # it will not heal by itself, so it is told at once and not only when the wait is over
            if address not in self._connections.refusals:
                logger.warning("no access to the server at %s", error)
            # why_missing names the address itself
            text = str(error).removeprefix(f"{address}: ")
            self._connections.refusals[address] = text
            return None
        except TransportError:
            return None
        self._connections.refusals.pop(address, None)
        return ServerInfo.from_json({**answer, "address": address})
