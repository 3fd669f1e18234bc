"""Keeps a client's pairs open: one to each server of the newest placement, off the data path."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Generic

from torch_eaas.client_pairs import CONTROL_TIMEOUT_S, C, hello_of, open_connection
from torch_eaas.comm.transport import Link, Transport
from torch_eaas.config import ClientConfig
from torch_eaas.control_tasks import ControlTasks
from torch_eaas.errors import PeerTimeout, TransportError
from torch_eaas.left_windows import LeftWindows
from torch_eaas.placement import Placement, ServerInfo
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.protocol.pairs import ClientPair
from torch_eaas.routing import LayerRoutes

CLOSE_S = 1.0
"""How long ``close`` waits for handshakes under way."""

logger = logging.getLogger(__name__)


class Connections(Generic[C]):
    """The open pairs of one client, and what it thinks of each server.

    ``live`` and ``placement`` are replaced as a whole, so the data path reads them without a lock;
    ``changes`` grows whenever either, or a suspicion, has changed.

    Args:
        config: The client's options.
        instance: The client's instance id.
        transport: Reaches the servers.
        clock: Seconds, monotonic.
        make: Makes an open pair of its two windows: ``Connection``.
    """

    def __init__(
        self,
        config: ClientConfig,
        instance: int,
        transport: Transport,
        clock: Callable[[], float],
        make: Callable[..., C],
    ) -> None:
        self._config = config
        self._instance = instance
        self._transport = transport
        self._clock = clock
        self._make = make
        self._spec = PairSpec.of(config)
        self._lock = threading.Lock()
        self._pairs: dict[int, ClientPair] = {}
        self._ended: list[Link] = []
        self._tasks = ControlTasks()
        self.left = LeftWindows()
        self._closed = False
        self.fingerprint = config.fingerprint
        self.placement = Placement()
        self.live: dict[str, C] = {}
        self.changes = 0
        self.placement_is_stale = False
        self.wanted_until = 0.0
        """Until when somebody waits for a holder of an expert, by this client's clock."""
        self.refusals: dict[str, str] = {}
        self._routes: dict[tuple[int, int], LayerRoutes] = {}
        self._routes_changes = -1

    @property
    def suspects(self) -> list[str]:
        """The servers to ask only while nobody else holds an expert: heard last, first."""
        suspects = [conn for conn in self.live.values() if conn.pair.suspect]
        suspects.sort(key=lambda conn: (not conn.num_free, -conn.pair.heard_at))
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
        self._close_links(self.left.forget_harmless())
        for conn in list(self.live.values()):
            if conn.link.closed:
                self.lose(conn)
        self._forget_left()
        now = self._clock()
        for server in self.placement.servers:
            pair = self._pairs.setdefault(server.instance, ClientPair())
            live = self.live.get(server.name)
            if live is None and pair.may_open(now) and not self.left.holds_up(server.instance):
                self._tasks.run(in_threads, server.instance, partial(self._open, server, pair))
            elif live is not None and self._is_stuck(live, now):
                self._tasks.run(in_threads, server.instance, partial(self._retire, live))

    def lose(self, conn: C, *, is_gone: bool = True) -> None:
        """Leave a pair: its server is gone, or (``is_gone`` False) late beyond all patience.

        Does not block. The next handshake is the probe that brings back who only hung.
        """
        with self._lock:
            if conn.lost:
                return
            conn.lost = True
            self._leave(conn)
            self._remove(conn)
            # a newer window of the same pair may be open by now
            if conn.pair.open_epoch == conn.epoch:
                conn.pair.leave(in_vain=not is_gone and not conn.was_heard)
                conn.pair.refused(self._clock(), random.random())
        what = "is gone" if is_gone else "hangs, or is cut off; its window is left"
        logger.warning("client %s: server %s %s", self._config.name, conn.name, what)

    def suspect(self, conn: C) -> None:
        """Ask this server only while nobody else holds an expert."""
        with self._lock:
            if conn.pair.suspect:
                return
            conn.pair.suspect = True
            conn.late_before = conn.num_late
            self.changes += 1
        logger.warning("client %s: server %s is late", self._config.name, conn.name)

    def heard(self, conn: C, now: float) -> None:
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
            live, self.live = self.live, {}
            self.changes += 1
        for conn in live.values():
            if conn.must_confirm:
                self._confirm(conn, conn.pair.retire())
            with self._lock:
                self._leave(conn)
        self._close_links(self.left.close())
        self._tasks.wait(CLOSE_S)

    def _remove(self, conn: C) -> None:
        """Take a connection off the live ones; the caller holds the lock."""
        self.live = {name: c for name, c in self.live.items() if c is not conn}
        self.changes += 1

    def _close_links(self, more: Sequence[Link] = ()) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for link in (*ended, *more):
            link.close()

    def _forget_left(self) -> None:
        """End the pairs of servers that have left the placement, once nobody waits for them."""
        wanted = {server.instance for server in self.placement.servers}
        for conn in list(self.live.values()):
            if conn.server.instance not in wanted and conn.num_in_use == 0:
                with self._lock:
                    self._remove(conn)
                    self._leave(conn)
        for instance in set(self._pairs) - wanted:
            if all(conn.server.instance != instance for conn in self.live.values()):
                self._pairs.pop(instance, None)

    def _is_stuck(self, conn: C, now: float) -> bool:
        """Return whether a window should be replaced: an answer has not come to it for long."""
        conn.reclaim()
        late, conn.late_before = conn.num_late > conn.late_before, conn.num_late
        if late and conn.pair.suspect:
            self.heard(conn, now)
        if late or not conn.num_given_up:
            conn.silent_since = None
            return False
        if conn.silent_since is None:
            conn.silent_since = now
        patience = self._config.request_timeout.total_seconds()
        return now - conn.silent_since > patience and conn.num_in_use == 0

    def _retire(self, conn: C) -> None:
        """Leave a window; a new one follows when the server can be talked to."""
        with self._lock:
            self._remove(conn)
            epoch = conn.pair.retire()
        self._confirm(conn, epoch)
        with self._lock:
            self._leave(conn)
        self._close_links()

    def _confirm(self, conn: C, epoch: int) -> None:
        """Let the server confirm that it writes into this window no more."""
        body = {"instance": f"{self._instance:016x}", "epoch": epoch}
        try:
            conn.link.call("close", body, timeout=CONTROL_TIMEOUT_S)
        except TransportError as error:
            # the memory stays as it is: a late write lands in it, and nobody looks there
            conn.was_cut |= isinstance(error, PeerTimeout)
            conn.pair.refused(self._clock(), random.random())
            logger.warning("client %s: window %d: %s", self._config.name, epoch, error)
        else:
            conn.is_confirmed = True

    def _leave(self, conn: C) -> None:
        """Have the link closed, and the memory kept as long as the server may write there."""
        if conn.must_confirm and not conn.is_confirmed:
            self.left.add(conn)
        else:
            self._ended.append(conn.link)

    def _open(self, server: ServerInfo, pair: ClientPair) -> None:
        epoch = pair.next_epoch()
        link: Link | None = None
        try:
            link = self._transport.dial(server.address, CONTROL_TIMEOUT_S, self._config.access)
            hello = hello_of(self._config, self._instance, epoch, self.fingerprint)
            conn, fingerprint = open_connection(
                *(self._make, self._transport, link, self._spec),
                server=server,
                pair=pair,
                hello=hello,
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
