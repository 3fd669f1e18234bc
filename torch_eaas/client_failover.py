"""What becomes of a share that is late, lost or refused: hedge, send again, wait, or give up.

The rules of who counts are in ``protocol/requests.py``; when a request is late, and how many extra
ones there may be, in ``protocol/hedging.py``.

Shape legend: T tokens, K experts per token, n tokens of a share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from torch_eaas.client_calls import Call, Sent, Share
from torch_eaas.client_pairs import Connection
from torch_eaas.client_pieces import IDS, Piece, split
from torch_eaas.config import ClientConfig
from torch_eaas.connections import Connections
from torch_eaas.errors import ExpertUnavailable
from torch_eaas.protocol.hedging import HedgeBudget
from torch_eaas.protocol.requests import Fate, Need
from torch_eaas.routing import LayerRoutes

RETRY_S = 0.01
"""Pause before a server that refused is asked again, where nobody else holds the experts."""

LOOK_AGAIN_S = 0.005
"""Pause before a late share looks again for somebody else to ask, or for leave to ask."""

Post = Callable[[Call, Share, list[Sent], float], None]
"""Sends one alternative of a share."""


class Failover:
    """Looks after the shares of a call that have no winner yet.

    Args:
        config: The client's options.
        connections: The open pairs.
        budget: How many extra requests there may be.
        counters: Counts hedges, resends, timeouts, and what was dropped.
        post: Sends one alternative.
    """

    def __init__(
        self,
        config: ClientConfig,
        connections: Connections[Connection],
        budget: HedgeBudget,
        *,
        counters: Counter[str],
        post: Post,
    ) -> None:
        self._connections = connections
        self._budget = budget
        self._counters = counters
        self._post = post
        self._name = config.name
        self._max_tokens = config.max_tokens
        fixed = config.hedge_after
        self._hedge_after = fixed.total_seconds() if fixed is not None else None
        self._request_timeout = config.request_timeout.total_seconds()
        self._recovery_timeout = config.recovery_timeout.total_seconds()
        self._drops = config.on_missing == "drop"
        # what was waited for in vain, as the placement and the pairs stood then
        self._missed: set[tuple[int, int]] = set()
        self._missed_changes = -1

    def late_after(self, name: str, num_tokens: int) -> float:
        """Return the seconds after which a request to a server is late."""
        if self._hedge_after is not None:
            return self._hedge_after
        conn = self._connections.live.get(name)
        # without a pair it is not late but lost
        return conn.pair.latencies.late_after(num_tokens) if conn is not None else 0.0

    def tend(self, call: Call, now: float) -> None:
        """Look at clocks and control sockets; ask others for what is late or lost."""
        for request in call.waiting:
            conn = request.conn
            if conn is not None and (conn.lost or conn.link.closed) and not request.has_word:
                self._connections.lose(conn)
                request.fate = Fate.LOST
        for share in list(call.shares):
            need = share.need(now)
            if need is Need.HEDGE:
                self._hedge(call, share, now)
            elif need is Need.RESEND:
                self._resend(call, share, now)
            elif need is Need.EXPIRE:
                self._expire(call, share, now)
        call.waiting = [r for r in call.waiting if r.fate is Fate.WAITING]

    # -- asking others -------------------------------------------------------------------------

    def _hedge(self, call: Call, share: Share, now: float) -> None:
        """Ask other holders beside a server that is late; the first complete answer wins."""
        share.hedged(now + LOOK_AGAIN_S)
        if share.alone_since == self._connections.changes:
            return
        requests = self._alternative(call, share)
        if not requests or any(request.server in share.tried for request in requests):
            # nobody else could answer: its own answer still counts, and it is not suspect for it
            share.alone_since = self._connections.changes
            return
        self._suspect_waiting(share, now)
        # halfway to failing the caller, an extra request is the lesser evil
        is_dire = now - share.sent_at >= self._request_timeout / 2
        if not self._budget.take(len(requests), now) and not is_dire:
            self._counters["hedges_over_budget"] += 1
            return
        self._counters["hedges"] += 1
        self._ask(call, share, requests, now)

    def _resend(self, call: Call, share: Share, now: float) -> None:
        """Ask again for what no answer will come to: another holder, or the same one later."""
        if share.retry_at is None:
            share.retry_at = now
        requests = self._alternative(call, share)
        if not requests:
            # nobody holds it: wait for a holder instead of an answer
            self._recover(call, share, now)
            return
        again = any(request.server in share.tried for request in requests)
        if again and share.failed:
            # its experts raise on this input: asking the same ones again changes nothing
            self._miss(call, share, now)
        elif not again or now >= share.retry_at:
            share.retry_at = now + RETRY_S
            self._counters["resends"] += 1
            self._ask(call, share, requests, now)

    def _ask(self, call: Call, share: Share, requests: list[Sent], now: float) -> None:
        if share.recovering:
            share.recovering = False
            share.deadline = now + self._request_timeout
        late_after = [self.late_after(r.server, len(r.piece.rows_n)) for r in requests]
        share.hedged(now + max(late_after))
        self._post(call, share, requests, now)

    def _alternative(self, call: Call, share: Share) -> list[Sent]:
        """Return requests for a share's contributions, or none while an expert has no holder."""
        piece = share.piece
        routes = self._routes(call, share)
        servers_nK = routes.choose(piece.ids_nK)
        if ((servers_nK < 0) & (piece.ids_nK >= 0)).any():
            return []
        return self._requests(piece, routes, servers_nK)

    def _routes(self, call: Call, share: Share) -> LayerRoutes:
        # who was asked and did not answer comes last, also behind other suspects
        return self._connections.routes_avoiding(call.layer, call.num_experts, share.tried)

    def _requests(
        self, piece: Piece, routes: LayerRoutes, servers_nK: NDArray[np.int16]
    ) -> list[Sent]:
        requests = []
        names = routes.servers
        for part in split(servers_nK, piece.ids_nK, piece.weights_nK, len(names), self._max_tokens):
            part.rows_n = piece.rows_n[part.rows_n]
            requests.append(Sent(part, names[part.server]))
        return requests

    def _suspect_waiting(self, share: Share, now: float) -> None:
        for request in share.waiting():
            if isinstance(request, Sent) and request.conn is not None:
                pair = request.conn.pair
                if not pair.suspect:
                    # its answer will not be looked at, but it took at least this long
                    pair.latencies.add(len(request.piece.rows_n), now - request.sent_at)
                self._connections.suspect(request.conn)

    # -- running out of time -------------------------------------------------------------------

    def _expire(self, call: Call, share: Share, now: float) -> None:
        """The time for an answer is over: wait for another holder, then give up."""
        if not share.recovering:
            self._counters["timeouts"] += 1
            self._suspect_waiting(share, now)
            self._recover(call, share, now)
        if now >= share.deadline:
            self._miss(call, share, now)

    def _recover(self, call: Call, share: Share, now: float) -> None:
        """Wait for a holder: for ``recovery_timeout`` from the first time that one is missing."""
        if not share.recovering:
            share.recovering = True
            if share.give_up_at is None:
                ids_nK = share.piece.ids_nK
                share.give_up_at = now + self.patience(call.layer, ids_nK[ids_nK >= 0])
            share.deadline = share.give_up_at
            self._connections.wanted_until = share.deadline

    def _miss(self, call: Call, share: Share, now: float) -> None:
        """Give up what a share lacks; if that is wanted, go on with what others hold."""
        piece = share.piece
        tried = tuple(share.tried)
        late = [request.server for request in share.waiting()]
        waited = f"within {now - share.sent_at:.3g} s"
        why = f"client {self._name} had no answer from {', '.join(late)} {waited}" if late else ""
        why = share.refusal or why or self._connections.why_missing()
        routes = self._routes(call, share)
        servers_nK = routes.choose(piece.ids_nK)
        hopeless = [i for i, name in enumerate(routes.servers) if name in tried]
        lonely_nK = (servers_nK < 0) | np.isin(servers_nK, hopeless)
        lonely_nK &= piece.ids_nK >= 0
        if not lonely_nK.any():
            self._ask(call, share, self._requests(piece, routes, servers_nK), now)
            return
        lonely_TK = np.zeros(call.ids_TK.shape, dtype=bool)
        lonely_TK[piece.rows_n] = lonely_nK
        self.give_up(call, lonely_TK, tried, why)
        for request in share.requests():
            assert isinstance(request, Sent)
            request.drop()
        call.shares.remove(share)
        rest_nK = np.where(lonely_nK, -1, piece.ids_nK)
        if (rest_nK >= 0).any():
            # a share that nobody was asked for yet: the next look sends it
            rest = Piece(piece.server, piece.rows_n, rest_nK, piece.weights_nK)
            call.shares.append(Share(rest, now, 0.0, self._request_timeout))

    def patience(self, layer: int, experts: IDS) -> float:
        """Return the seconds to wait for holders of experts that have none."""
        if self._missed_changes == self._connections.changes and self._missed.issuperset(
            (layer, expert) for expert in experts.tolist()
        ):
            # waited for in vain already, and nothing has changed since
            return 0.0
        return self._recovery_timeout

    def give_up(
        self, call: Call, lonely_TK: NDArray[np.bool_], tried: Sequence[str], why: str
    ) -> None:
        """Raise ExpertUnavailable, or go on without these contributions if that is wanted."""
        experts = sorted({int(expert) for expert in call.ids_TK[lonely_TK]})
        if not self._drops:
            raise ExpertUnavailable(call.layer, experts[0], tuple(tried), why)
        if self._missed_changes != self._connections.changes:
            self._missed_changes, self._missed = self._connections.changes, set()
        self._missed.update((call.layer, expert) for expert in experts)
        self._counters["dropped_contributions"] += int(lonely_TK.sum())
        call.drop(lonely_TK)
