"""What drives a call: sends its pieces, waits, reads the answers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from torch_eaas.client_calls import Call, Sent, Share
from torch_eaas.client_failover import Failover
from torch_eaas.client_pairs import Connection
from torch_eaas.client_pieces import split
from torch_eaas.client_turns import Turn
from torch_eaas.comm.quiet import Quiet
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig
from torch_eaas.connections import Connections
from torch_eaas.errors import RequestRefused
from torch_eaas.protocol.hedging import HedgeBudget
from torch_eaas.protocol.layout import Status
from torch_eaas.protocol.requests import Fate
from torch_eaas.routing import LayerRoutes
from torch_eaas.spans import is_profiling, mark

SLICE_S = 0.002
"""How long a wait looks only at words before it looks at clocks and control sockets again."""

LONGEST_QUIET_S = 0.02
"""A client sleeps through the quickest answer of lately, to batches of like size, before it looks
for one, but not for longer: deadlines and control sockets wait meanwhile."""


class CallEngine:
    """Carries calls from their first request to a winner for every share.

    Args:
        config: The client's options.
        instance: The client's instance id.
        transport: Waits for words.
        connections: The open pairs.
        clock: Seconds, monotonic.
        counters: Counts requests, hedges, resends and refusals.
    """

    def __init__(
        self,
        config: ClientConfig,
        instance: int,
        transport: Transport,
        connections: Connections[Connection],
        *,
        clock: Callable[[], float],
        counters: Counter[str],
    ) -> None:
        self._config = config
        self._instance = instance
        self._transport = transport
        self._connections = connections
        self._clock = clock
        self._counters = counters
        self._budget = HedgeBudget()
        self._failover = Failover(
            config, connections, self._budget, counters=counters, post=self._post
        )
        self._request_timeout = config.request_timeout.total_seconds()
        self._answers: defaultdict[int, Quiet] = defaultdict(lambda: Quiet(LONGEST_QUIET_S))
        self._slots_per_call = config.slots - config.max_micro_batches + 1

    def begin(self, call: Call, turn: Turn) -> None:
        """Send a call's pieces; what finds no free slot follows in ``finish``."""
        routes, servers_TK = self._await_holders(call, turn)
        now = self._clock()
        num_servers, max_tokens = len(routes.servers), self._config.max_tokens
        sent_to = [0] * num_servers
        for piece in split(servers_TK, call.ids_TK, call.weights_TK, num_servers, max_tokens):
            name = routes.servers[piece.server]
            # a second for each further request to the same server
            timeout = self._timeout(name) + sent_to[piece.server]
            sent_to[piece.server] += 1
            late_after = self._failover.late_after(name, len(piece.rows_n))
            share = Share(piece, now, late_after, timeout)
            call.shares.append(share)
            request = Sent(piece, name)
            share.add((request,))
            if not self._send(call, share, request, now):
                call.unsent.append((share, request))
        call.sent_at = now
        self._budget.sent(len(call.shares), now)
        # one bell for all: where waiting polls it is free
        self._transport.ring()

    def finish(self, call: Call, turn: Turn) -> None:
        """Wait until every share has a winner; fail over what is late or lost."""
        started = self._clock()
        size_class = call.num_tokens.bit_length()
        quiet = self._answers[size_class]
        # one long sleep costs one wake-up; the answers are then looked for in short ones
        quiet_until = max(started, call.sent_at + quiet.seconds)
        was_seen = False
        while True:
            # read before the words are: what came while this process stood still is not late
            now = self._clock()
            if self._collect(call):
                break
            self._failover.tend(call, now)
            waited = max(0.0, now - quiet_until)
            left = max(0.0, quiet_until - now)
            wait = self._transport.wait
            was_seen = turn.wait(wait, call.has_news, SLICE_S, waited, quiet=left)
        if was_seen:
            # what was there before anybody looked says nothing about the next one
            quiet.add(self._clock() - call.sent_at)

    # -- sending -------------------------------------------------------------------------------

    def _await_holders(self, call: Call, turn: Turn) -> tuple[LayerRoutes, NDArray[np.int16]]:
        """Return a holder for every expert of the call, ``(T, K)``; wait for one if need be."""
        deadline: float | None = None
        while True:
            routes = self._connections.routes(call.layer, call.num_experts)
            servers_TK = routes.choose(call.ids_TK)
            if routes.is_complete:
                return routes, servers_TK
            lonely_TK = (servers_TK < 0) & (call.ids_TK >= 0)
            if not lonely_TK.any():
                return routes, servers_TK
            now = self._clock()
            deadline = deadline or now + self._failover.patience(call.layer, call.ids_TK[lonely_TK])
            if now >= deadline:
                self._failover.give_up(call, lonely_TK, (), self._connections.why_missing())
                return routes, servers_TK
            turn.wait(_sleep, _never, SLICE_S)

    def _timeout(self, name: str) -> float:
        conn = self._connections.live.get(name)
        if conn is not None and conn.pair.heard:
            return self._request_timeout
        return self._config.first_request_timeout.total_seconds()

    def _post(self, call: Call, share: Share, requests: list[Sent], now: float) -> None:
        """Send one alternative of a share, as far as slots are free."""
        share.add(requests)
        for request in requests:
            if not self._send(call, share, request, now):
                call.unsent.append((share, request))
        self._transport.ring()

    def _send(self, call: Call, share: Share, request: Sent, now: float) -> bool:
        """Send a request; return False if it has to wait for a slot."""
        conn = self._connections.live.get(request.server)
        if conn is None:
            request.fate = Fate.LOST
            return True
        # a split batch leaves one slot for each other micro-batch
        is_split = call.num_tokens > self._config.max_tokens
        if is_split and call.slots_of(conn) >= self._slots_per_call:
            return False
        slot = conn.take()
        if slot is None:
            return False
        budget_us = max(0, int((share.deadline - now) * 1e6))
        piece, version = request.piece, self._connections.placement.version
        request.conn, request.slot, request.sent_at = conn, slot, now
        request.word = conn.send(
            slot, call.layer, call.x_TD, piece, budget_us, version, call.scales_Td
        )
        call.waiting.append(request)
        self._counters["requests"] += 1
        return True

    def _send_more(self, call: Call) -> None:
        """Use slots that have become free for what could not be sent yet."""
        for request in call.sent():
            if request.fate is Fate.ANSWERED and request.conn is not None:
                request.keep()
        left, now = len(call.unsent), self._clock()
        call.unsent = [
            (share, request)
            for share, request in call.unsent
            if share.winner is None
            and request.fate is Fate.WAITING
            and not self._send(call, share, request, now)
        ]
        if len(call.unsent) < left:
            self._transport.ring()

    # -- receiving -----------------------------------------------------------------------------

    def _collect(self, call: Call) -> bool:
        """Read the answers that have come; return whether every share has its winner."""
        came = False
        for request in call.waiting:
            if request.has_word:
                if not came:
                    came, now = True, self._clock()
                self._read(call, request, now)
        if came:
            call.waiting = [r for r in call.waiting if r.fate is Fate.WAITING]
        if call.unsent:
            self._send_more(call)
        settled = [share.settle() for share in call.shares]
        return all(settled)

    def _read(self, call: Call, request: Sent, now: float) -> None:
        conn = request.conn
        assert conn is not None
        header = conn.header(request.slot)
        self._connections.heard(conn, now)
        if is_profiling():
            mark("read", conn.name, self._instance, conn.epoch, request.slot, request.word >> 8)
        if (header.instance, header.epoch) != (self._instance, conn.epoch):
            request.fate = Fate.LOST
            request.free()
            self._counters["stale"] += 1
        elif header.status == Status.OK:
            request.fate = Fate.ANSWERED
            conn.pair.latencies.add(len(request.piece.rows_n), now - request.sent_at)
            call.experts_us = max(call.experts_us, header.experts_us)
        else:
            self._refused(call, request, conn, header.status, header.size)

    def _refused(self, call: Call, request: Sent, conn: Connection, code: int, size: int) -> None:
        text = conn.text(request.slot, size)
        request.fate = Fate.LOST
        request.free()
        status = Status(code) if code in Status.__members__.values() else Status.INTERNAL
        self._counters[f"refused_{status.name.lower()}"] += 1
        if not status.may_retry:
            raise RequestRefused(f"layer {call.layer}: server {conn.name} refused: {text}")
        if status is Status.UNKNOWN_EXPERT:
            self._connections.placement_is_stale = True
        for share in call.shares:
            if request in share.requests():
                share.refusal = f"{conn.name}: {text}"
                share.failed |= status is Status.INTERNAL


def _never() -> bool:
    return False


def _sleep(
    ready: Callable[[], bool], timeout: float, waited: float = 0.0, *, quiet: float = 0.0
) -> bool:
    """Wait where no word will come, as ``Transport.wait`` does where one may."""
    time.sleep(timeout)
    return ready()
