"""Keeps a client's pairs open: one to each server of the newest placement, off the data path."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

from torch_eaas.client_pairs import CONTROL_TIMEOUT_S, Connection, open_connection
from torch_eaas.comm.transport import Json, Link, Transport
from torch_eaas.config import ClientConfig
from torch_eaas.errors import TransportError
from torch_eaas.placement import Placement, ServerInfo
from torch_eaas.protocol.layout import PROTOCOL_VERSION, PairSpec
from torch_eaas.protocol.pairs import ClientPair
from torch_eaas.routing import LayerRoutes

CLOSE_S = 1.0
"""How long ``close`` waits for handshakes under way."""

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
        self._ended: list[Link] = []
        self._busy: set[int] = set()
        self._closed = False
        self.fingerprint = config.fingerprint
        self.placement = Placement()
        self.live: dict[str, Connection] = {}
        self.changes = 0
        self.placement_is_stale = False
        self.refusals: dict[str, str] = {}
        self._routes: dict[tuple[int, int], LayerRoutes] = {}
        self._routes_changes = -1

    @property
    def suspects(self) -> list[str]:
        """The servers to ask only while nobody else holds an expert: heard last, first."""
        suspects = [conn for conn in self.live.values() if conn.pair.suspect]
        suspects.sort(key=lambda conn: (not conn.slots.num_free, -conn.pair.heard_at))
        return [conn.name for conn in suspects]

    def routes(self, layer: int, num_experts: int) -> LayerRoutes:
        """Return the servers to ask for a layer's experts, as things stand."""
        changes = self.changes
        if changes != self._routes_changes:
            self._routes = {}
            self._routes_changes = changes
        routes = self._routes.get((layer, num_experts))
        if routes is None:
            routes = self.routes_avoiding(layer, num_experts, ())
            self._routes[layer, num_experts] = routes
        return routes

    def routes_avoiding(self, layer: int, num_experts: int, tried: Collection[str]) -> LayerRoutes:
        """Return routes that use suspects, and last who was ``tried``, only for want of others."""
        suspects = [name for name in self.suspects if name not in tried]
        return LayerRoutes(
            self.placement,
            layer,
            num_experts,
            open_servers=self.live,
            suspects=[*suspects, *tried],
            salt=self._instance,
        )

    @property
    def closed(self) -> list[str]:
        """The names of the servers to which no pair is open now."""
        return [server.name for server in self.placement.servers if server.name not in self.live]

    def why_missing(self) -> str:
        """Return what keeps servers from being asked, for an error's text."""
        told = [f"{name}: {text}" for name, text in self.refusals.items()]
        if not self.placement.servers:
            return "; ".join(["no server is known yet", *told])
        if closed := self.closed:
            return "; ".join([f"no pair is open to {', '.join(closed)}", *told])
        return f"none of {', '.join(s.name for s in self.placement.servers)} holds it"

    def follow(self, placement: Placement) -> None:
        """Take a newer placement; pairs open and close at the next ``maintain``."""
        with self._lock:
            self.placement = placement
            self.changes += 1

    def maintain(self, *, in_threads: bool = True) -> None:
        """Open what is missing, drop what is lost, replace windows that no answer comes to.

        Never on the data path. Control calls may take seconds where a server hangs, so each
        server has a thread for its own, or all wait their turn here.
        """
        self._close_links()
        for conn in list(self.live.values()):
            if conn.link.closed:
                self.lose(conn)
        self._forget_left()
        now = self._clock()
        for server in self.placement.servers:
            pair = self._pairs.setdefault(server.instance, ClientPair())
            live = self.live.get(server.name)
            if live is None and pair.may_open(now):
                self._run(in_threads, server.instance, partial(self._open, server, pair))
            elif live is not None and self._is_stuck(live, now):
                self._run(in_threads, server.instance, partial(self._retire, live))

    def lose(self, conn: Connection) -> None:
        """Note that a server is gone: its pair is of no more use. Does not block."""
        with self._lock:
            if conn.lost:
                return
            conn.lost = True
            self._ended.append(conn.link)
            self._remove(conn)
            # a newer window of the same pair may be open by now
            if conn.pair.open_epoch == conn.epoch:
                conn.pair.retire()
                conn.pair.refused(self._clock(), random.random())
        logger.warning("client %s: server %s is gone", self._config.name, conn.name)

    def suspect(self, conn: Connection) -> None:
        """Ask this server only while nobody else holds an expert."""
        with self._lock:
            if conn.pair.suspect:
                return
            conn.pair.suspect = True
            conn.late_before = conn.num_late
            self.changes += 1
        logger.warning("client %s: server %s is late", self._config.name, conn.name)

    def heard(self, conn: Connection, now: float) -> None:
        """Note an answer: the server lives and is no longer suspect."""
        conn.pair.heard, conn.pair.heard_at = True, now
        if conn.pair.suspect:
            with self._lock:
                conn.pair.suspect = False
                self.changes += 1
            logger.info("client %s: server %s is back", self._config.name, conn.name)

    def close(self) -> None:
        """End all pairs."""
        with self._lock:
            self._closed = True
            self._ended.extend(conn.link for conn in self.live.values())
            self.live = {}
            self.changes += 1
        self._close_links()
        deadline = time.monotonic() + CLOSE_S
        while self._busy and time.monotonic() < deadline:
            time.sleep(0.005)

    def _run(self, in_thread: bool, instance: int, task: Callable[[], None]) -> None:
        """Run a control task of one server, unless one is under way."""
        if instance in self._busy:
            return
        self._busy.add(instance)

        def run() -> None:
            try:
                task()
            finally:
                self._busy.discard(instance)

        if in_thread:
            threading.Thread(target=run, name="eaas-handshake", daemon=True).start()
        else:
            run()

    def _remove(self, conn: Connection) -> None:
        """Take a connection off the live ones; the caller holds the lock."""
        self.live = {name: c for name, c in self.live.items() if c is not conn}
        self.changes += 1

    def _close_links(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for link in ended:
            link.close()

    def _forget_left(self) -> None:
        """End the pairs of servers that have left the placement, once nobody waits for them."""
        wanted = {server.instance for server in self.placement.servers}
        for conn in list(self.live.values()):
            if conn.server.instance not in wanted and conn.slots.num_in_use == 0:
                with self._lock:
                    self._remove(conn)
                    self._ended.append(conn.link)
        for instance in set(self._pairs) - wanted:
            if all(conn.server.instance != instance for conn in self.live.values()):
                self._pairs.pop(instance, None)

    def _is_stuck(self, conn: Connection, now: float) -> bool:
        """Return whether a window should be replaced: an answer has not come to it for long."""
        conn.reclaim()
        late, conn.late_before = conn.num_late > conn.late_before, conn.num_late
        if late and conn.pair.suspect:
            self.heard(conn, now)
        if late or not conn.slots.num_given_up:
            conn.silent_since = None
            return False
        if conn.silent_since is None:
            conn.silent_since = now
        patience = self._config.request_timeout.total_seconds()
        return now - conn.silent_since > patience and conn.slots.num_in_use == 0

    def _retire(self, conn: Connection) -> None:
        """Leave a window; a new one follows when the server can be talked to."""
        with self._lock:
            self._remove(conn)
            epoch = conn.pair.retire()
        body = {"instance": f"{self._instance:016x}", "epoch": epoch}
        try:
            conn.link.call("close", body, timeout=CONTROL_TIMEOUT_S)
        except TransportError as error:
            # the memory stays as it is: a late write lands in it, and nobody looks there
            conn.pair.refused(self._clock(), random.random())
            logger.warning("client %s: window %d: %s", self._config.name, epoch, error)
        conn.link.close()

    def _open(self, server: ServerInfo, pair: ClientPair) -> None:
        epoch = pair.next_epoch()
        link: Link | None = None
        try:
            link = self._transport.dial(
                server.address, CONTROL_TIMEOUT_S, self._config.access.token
            )
            hello = self._hello(epoch)
            conn, fingerprint = open_connection(
                self._transport, link, self._spec, server=server, pair=pair, hello=hello
            )
        except Exception as error:
            # an attempt that fails in any way leaves nothing behind, and is made again
            if link is not None:
                link.close()
            pair.refused(self._clock(), random.random())
            if self.refusals.get(server.name) != str(error):
                self.refusals[server.name] = str(error)
                logger.warning("client %s: server %s: %s", self._config.name, server.name, error)
            return
        self.refusals.pop(server.name, None)
        # in exact mode a row's bits must not depend on who holds its expert: all keep one storage
        if not self.fingerprint or self._config.combine == "exact":
            self.fingerprint = fingerprint or self.fingerprint
        with self._lock:
            if self._closed:
                self._ended.append(link)
            else:
                pair.opened(epoch)
                self.live = {**self.live, server.name: conn}
                self.changes += 1
        if self._closed:
            self._close_links()

    def _hello(self, epoch: int) -> Json:
        """Return what a handshake says of this client."""
        return {
            "client": self._config.name,
            "instance": f"{self._instance:016x}",
            "epoch": epoch,
            "protocol": PROTOCOL_VERSION,
            "fingerprint": self.fingerprint,
        }
