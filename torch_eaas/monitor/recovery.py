"""Who is asked to load the experts that nobody holds: pure, stepped with the monitor's clock."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch_eaas.config import MonitorConfig
from torch_eaas.monitor.announcement import ModelInfo
from torch_eaas.monitor.roster import Member
from torch_eaas.placement import Holdings, Placement, holdings_from, pairs_of

Pair = tuple[int, int]
"""Layer and expert."""


def plan_loads(wanted: Iterable[Pair], rooms: Mapping[int, int]) -> dict[Pair, int]:
    """Return which server should load each expert: the one that has most room left.

    Equal servers take turns in the order of ``rooms``. Experts for which nobody has room are left
    out.

    Example:
        Three experts and the rooms ``{7: 2, 9: 1}`` give ``{(0, 0): 7, (0, 1): 7, (0, 2): 9}``.
    """
    heap = [(-room, turn, key) for turn, (key, room) in enumerate(rooms.items()) if room > 0]
    heapq.heapify(heap)
    plan: dict[Pair, int] = {}
    for pair in sorted(wanted):
        if not heap:
            break
        room, turn, key = heap[0]
        plan[pair] = key
        if room < -1:
            heapq.heapreplace(heap, (room + 1, turn, key))
        else:
            heapq.heappop(heap)
    return plan


class Asks:
    """Which server is asked to load which expert; an ask stands until somebody serves the expert.

    Servers are named by instance id.

    Args:
        timeout: Seconds in which a server must have loaded something of what it was asked.
        rest: Seconds for which a server that failed is asked nothing.
    """

    def __init__(self, timeout: float, rest: float) -> None:
        self._timeout = timeout
        self._rest = rest
        self._asks: dict[Pair, int] = {}
        self._heard: dict[int, float] = {}
        self._resting: dict[int, float] = {}

    def of(self, server: int) -> Holdings:
        """Return what a server is asked to load."""
        return holdings_from(pair for pair, asked in self._asks.items() if asked == server)

    def step(self, wanted: Collection[Pair], rooms: Mapping[int, int], now: float) -> Counter[int]:
        """End what is done or cannot be done, ask for what is left; return how much of whom."""
        if not wanted and not self._asks:
            return Counter()
        for pair in self._asks.keys() - set(wanted):
            self._heard[self._asks.pop(pair)] = now
        self._asks = {pair: server for pair, server in self._asks.items() if server in rooms}
        asked = Counter(self._asks.values())
        left = {
            server: room - asked[server]
            for server, room in rooms.items()
            if self._resting.get(server, now) <= now
        }
        new = plan_loads((pair for pair in wanted if pair not in self._asks), left)
        counts = Counter(new.values())
        self._heard.update((server, now) for server in counts if not asked[server])
        self._asks.update(new)
        return counts

    def late(self, now: float) -> list[int]:
        """Return the servers whose time is over; their asks end."""
        over = [s for s in set(self._asks.values()) if now - self._heard[s] > self._timeout]
        for server in over:
            self.refuse(server, now)
        return over

    def refuse(self, server: int, now: float) -> bool:
        """End a server's asks and let it rest, since it failed; return whether it had any."""
        kept = {pair: asked for pair, asked in self._asks.items() if asked != server}
        had, self._asks = len(kept) < len(self._asks), kept
        if had:
            self._resting[server] = now + self._rest
        return had

    def forget(self, server: int) -> None:
        """Drop what is remembered of a server that has gone."""
        self._heard.pop(server, None)
        self._resting.pop(server, None)

    def extend(self, gap: float) -> None:
        """Take no account of a time in which the monitor itself was suspended."""
        self._heard = {server: at + gap for server, at in self._heard.items()}
        self._resting = {server: at + gap for server, at in self._resting.items()}


class Recovery:
    """Keeps every expert of the model at a server that stays, as long as somebody has room.

    An expert that was served before is asked for at once. Others may still be on their way while a
    cluster starts, so they are asked for ``start_grace`` after its first server came.

    Args:
        config: Time limits.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self._grace = config.start_grace.total_seconds()
        self._asks = Asks(config.load_timeout.total_seconds(), config.lease.total_seconds())
        self._model: ModelInfo | None = None
        self._model_at = 0.0
        self._served: set[Pair] = set()
        self._rooms: dict[int, int] = {}
        self.uncovered: list[Pair] = []
        """Experts that no live server holds which is going to stay."""

    def follow(self, model: ModelInfo | None, live: Placement, now: float) -> None:
        """Take in what the live servers hold."""
        if model is None:
            return
        if model != self._model:
            self._model, self._model_at, self._served = model, now, set()
        self.uncovered = live.missing(model.layers, model.num_experts, worst="serving")
        for server in live.servers:
            self._served.update(pairs_of(server.holdings))

    def plan(self, servers: Sequence[Member], now: float) -> list[tuple[str, str]]:
        """Ask servers for what is uncovered; return events, kind and text."""
        said = {member.announcement.instance: member for member in servers}
        self._rooms = {
            instance: member.announcement.room
            for instance, member in said.items()
            if member.announcement.state == "serving" and member.announcement.model == self._model
        }
        events = [
            ("late", f"{said[server]} has not loaded what it was asked to")
            for server in self._asks.late(now)
            if server in said
        ]
        in_grace = now - self._model_at < self._grace
        wanted = [pair for pair in self.uncovered if not in_grace or pair in self._served]
        for server, count in self._asks.step(wanted, self._rooms, now).items():
            events.append(("ask", f"{said[server]} is asked to load experts: {count}"))
        return events

    def asked_of(self, server: int) -> Holdings:
        """Return what a server is asked to load."""
        return self._asks.of(server)

    def pending(self, draining: Member) -> int:
        """Return how many experts of a draining server somebody else may still load."""
        if not any(room > 0 for room in self._rooms.values()):
            return 0
        return len(set(self.uncovered) & set(pairs_of(draining.announcement.holdings)))

    def refuse(self, server: int, now: float) -> None:
        """Note that a server could not load what it was asked to."""
        self._asks.refuse(server, now)

    def forget(self, server: int) -> None:
        """Drop what is remembered of a server that has gone."""
        self._asks.forget(server)

    def extend(self, gap: float) -> None:
        """Take no account of a time in which the monitor itself was suspended."""
        self._model_at += gap
        self._asks.extend(gap)
