"""Keeps a client's pairs open: one to each server of the newest placement, off the data path."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from torch_eaas.client_pairs import Connection
from torch_eaas.comm.transport import Link, Transport
from torch_eaas.config import ClientConfig
from torch_eaas.errors import EaasError, HandshakeRefused, TransportError
from torch_eaas.placement import Placement, ServerInfo
from torch_eaas.protocol.layout import PROTOCOL_VERSION, PairSpec
from torch_eaas.protocol.pairs import ClientPair
from torch_eaas.routing import LayerRoutes

CONTROL_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class Connections:
    """The open pairs of one client, and what it thinks of each server.

    ``live`` and ``placement`` are replaced as a whole, so the data path reads them without a lock;
    ``changes`` grows whenever either, or a suspicion, has changed.

    Args:
        config: The client's options.
        instance: The client's instance id.
        transport: Reaches the servers.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        config: ClientConfig,
        instance: int,
        transport: Transport,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._instance = instance
        self._transport = transport
        self._clock = clock
        self._spec = PairSpec(
            hidden_size=config.hidden_size,
            top_k=config.top_k,
            slots=config.slots,
            max_tokens=config.max_tokens,
            wire_dtype=config.wire_dtype,
            reply_dtype=config.reply_dtype,
            combine=config.combine,
        )
        self._lock = threading.Lock()
        self._pairs: dict[int, ClientPair] = {}
        self._retired: list[Connection] = []
        self.fingerprint = config.fingerprint
        self.placement = Placement()
        self.live: dict[str, Connection] = {}
        self.changes = 0
        self.placement_is_stale = False
        self.refusals: dict[str, str] = {}
        self._routes: dict[tuple[int, int], LayerRoutes] = {}
        self._routes_changes = -1

    @property
    def suspects(self) -> set[str]:
        """Names of the servers to ask only while nobody else holds an expert."""
        return {name for name, conn in self.live.items() if conn.pair.suspect}

    def routes(self, layer: int, num_experts: int) -> LayerRoutes:
        """Return the servers to ask for a layer's experts, as things stand."""
        changes = self.changes
        if changes != self._routes_changes:
            self._routes = {}
            self._routes_changes = changes
        routes = self._routes.get((layer, num_experts))
        if routes is None:
            routes = LayerRoutes(
                self.placement,
                layer,
                num_experts,
                open_servers=self.live,
                suspects=self.suspects,
                salt=self._instance,
            )
            self._routes[layer, num_experts] = routes
        return routes

    def why_missing(self) -> str:
        """Return what keeps servers from being asked, for an error's text."""
        if not self.placement.servers:
            return "no server is known yet"
        closed = [s.name for s in self.placement.servers if s.name not in self.live]
        told = [f"{name}: {text}" for name, text in self.refusals.items()]
        if closed:
            return "; ".join([f"no pair is open to {', '.join(closed)}", *told])
        return f"none of {', '.join(s.name for s in self.placement.servers)} holds it"

    def follow(self, placement: Placement) -> None:
        """Take a newer placement; pairs open and close at the next ``maintain``."""
        with self._lock:
            self.placement = placement
            self.changes += 1

    def maintain(self) -> None:
        """Open what is missing, drop what is lost, retire what no answer comes from.

        Blocks for control calls; never on the data path.
        """
        self._drop_lost()
        self._refresh_suspects()
        for server in self.placement.servers:
            pair = self._pairs.setdefault(server.instance, ClientPair(self._config.max_retired))
            if server.name not in self.live and pair.may_open(self._clock()):
                self._try_open(server, pair)

    def lose(self, conn: Connection) -> None:
        """Note that a server is gone: its pair is of no more use."""
        with self._lock:
            conn.lost = True
            if self.live.get(conn.name) is conn:
                self.live = {name: c for name, c in self.live.items() if c is not conn}
                if conn.pair.is_open:
                    conn.pair.revoked(conn.pair.retire())
                conn.pair.refused(self._clock(), random.random())
                self.changes += 1
                logger.warning("client %s: server %s is gone", self._config.name, conn.name)
        conn.link.close()

    def suspect(self, conn: Connection) -> None:
        """Ask this server only while nobody else holds an expert."""
        if not conn.pair.suspect:
            conn.pair.suspect = True
            with self._lock:
                self.changes += 1
            logger.warning("client %s: server %s is late", self._config.name, conn.name)

    def close(self) -> None:
        """End all pairs."""
        with self._lock:
            connections, self.live = list(self.live.values()), {}
            self.changes += 1
        for conn in connections:
            conn.link.close()

    def _drop_lost(self) -> None:
        wanted = {server.instance for server in self.placement.servers}
        for conn in list(self.live.values()):
            if conn.link.closed:
                self.lose(conn)
            elif conn.server.instance not in wanted and conn.slots.num_in_use == 0:
                self._forget(conn)

    def _forget(self, conn: Connection) -> None:
        """End the pair of a server that has left the placement and still answers."""
        with self._lock:
            self.live = {name: c for name, c in self.live.items() if c is not conn}
            self.changes += 1
        conn.link.close()
        self._pairs.pop(conn.server.instance, None)

    def _refresh_suspects(self) -> None:
        for conn in list(self.live.values()):
            if not conn.pair.suspect:
                continue
            if conn.reclaim():
                with self._lock:
                    self.changes += 1
                logger.info("client %s: server %s is back", self._config.name, conn.name)
            elif conn.slots.num_given_up and not conn.slots.num_in_use and not conn.slots.num_free:
                self._retire(conn)

    def _retire(self, conn: Connection) -> None:
        """Leave a window whose slots all wait for answers that do not come; a new one follows."""
        with self._lock:
            self.live = {name: c for name, c in self.live.items() if c is not conn}
            self.changes += 1
            epoch = conn.pair.retire()
        body = {"instance": f"{self._instance:016x}", "epoch": epoch}
        try:
            conn.link.call("close", body, timeout=CONTROL_TIMEOUT_S)
            conn.pair.revoked(epoch)
        except TransportError as error:
            # the window stays as it is until the server is gone: a late write may still come
            self._retired.append(conn)
            logger.warning("client %s: window %d: %s", self._config.name, epoch, error)

    def _try_open(self, server: ServerInfo, pair: ClientPair) -> None:
        epoch = pair.next_epoch()
        link: Link | None = None
        try:
            link = self._transport.dial(server.address, CONTROL_TIMEOUT_S)
            conn = self._handshake(server, pair, link, epoch)
        except EaasError as error:
            if link is not None:
                link.close()
            pair.refused(self._clock(), random.random())
            if self.refusals.get(server.name) != str(error):
                self.refusals[server.name] = str(error)
                logger.warning("client %s: server %s: %s", self._config.name, server.name, error)
            return
        self.refusals.pop(server.name, None)
        with self._lock:
            pair.opened(epoch)
            self.live = {**self.live, server.name: conn}
            self.changes += 1

    def _handshake(
        self, server: ServerInfo, pair: ClientPair, link: Link, epoch: int
    ) -> Connection:
        window = self._transport.create_window(self._spec.reply_bytes)
        try:
            body = {
                "client": self._config.name,
                "instance": f"{self._instance:016x}",
                "epoch": epoch,
                "protocol": PROTOCOL_VERSION,
                "fingerprint": self.fingerprint,
                "spec": self._spec.to_json(),
            }
            answer, windows = link.call("handshake", body, [window], timeout=CONTROL_TIMEOUT_S)
            replies = window.view
        finally:
            window.close()
        self._check(server, answer, [w.nbytes for w in windows])
        requests = windows[0].view
        windows[0].close()
        # in exact mode a row's bits must not depend on who holds its expert: all keep one storage
        if not self.fingerprint or self._config.combine == "exact":
            self.fingerprint = answer["fingerprint"] or self.fingerprint
        return Connection(
            server,
            link,
            self._spec,
            pair=pair,
            instance=self._instance,
            epoch=epoch,
            requests=requests,
            replies=replies,
        )

    def _check(self, server: ServerInfo, answer: dict[str, object], sizes: list[int]) -> None:
        if answer.get("instance") != f"{server.instance:016x}":
            raise HandshakeRefused(
                f"{server.address} is now instance {answer.get('instance')}, "
                f"the placement names {server.instance:016x}"
            )
        if sizes != [self._spec.request_bytes]:
            raise HandshakeRefused(
                f"a handshake's answer brings one window of {self._spec.request_bytes} bytes, "
                f"got {sizes}"
            )
