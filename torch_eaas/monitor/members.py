"""Who is alive and who holds what: pure state, stepped with the receiver's monotonic clock."""

from __future__ import annotations

from dataclasses import replace

from torch_eaas.config import MonitorConfig
from torch_eaas.errors import ConfigError
from torch_eaas.monitor.announcement import Announcement, Heartbeat, Known, ModelInfo, Status
from torch_eaas.monitor.checks import check_holdings, check_same_model
from torch_eaas.monitor.events import EventLog
from torch_eaas.monitor.recovery import Recovery
from torch_eaas.monitor.roster import Member, Roster
from torch_eaas.monitor.terms import Terms
from torch_eaas.placement import Holdings, Placement, pairs_of

_GONE_AFTER = 10
"""Leases of silence after which a suspect counts as gone."""


class Members:
    """The members of one cluster, and the placements that follow from what servers announce.

    Every method takes ``now``, seconds on one monotonic clock. Nothing here waits, locks or does
    I/O; one thread calls it.

    Args:
        config: Lease and heartbeat.
        instance: The random 64-bit id of this life of the monitor.
        now: The time of the start.
    """

    def __init__(self, config: MonitorConfig, instance: int, now: float) -> None:
        self.config = config
        self.instance = instance
        self.placement = Placement()
        self.model: ModelInfo | None = None
        self.log = EventLog(instance)
        self.leases_expired = 0
        self._lease = config.lease.total_seconds()
        self._terms = Terms(instance, self._lease, now)
        self._roster = Roster()
        self._last = now
        # what the live servers and the suspects hold, published or not
        self._composed = Placement()
        self._missing: list[tuple[int, int]] = []
        self._recovery = Recovery(config)

    @property
    def tick_seconds(self) -> float:
        """How often ``tick`` wants to be called."""
        return min(self.config.heartbeat.total_seconds(), self._lease / 10)

    @property
    def waiting(self) -> bool:
        """Whether the monitor still waits for members after a restart, and decides nothing."""
        return self._terms.waiting

    @property
    def servers(self) -> list[Member]:
        """The live servers, by name."""
        return self._roster.of_role("server")

    @property
    def clients(self) -> list[Member]:
        """The live clients, by name."""
        return self._roster.of_role("client")

    @property
    def suspects(self) -> list[Member]:
        """Servers whose lease expired and whose name no other life has taken."""
        return self._roster.suspects

    @property
    def silent_clients(self) -> list[int]:
        """Clients, by instance, whose lease has expired in the last ten leases."""
        told_for = (_GONE_AFTER - 1) * self._lease
        silent = self._roster.silent_clients
        return [m.announcement.instance for m in silent if self._last <= m.deadline + told_for]

    def missing(self) -> list[tuple[int, int]]:
        """Return the (layer, expert) pairs of the model that no live server holds."""
        return list(self._missing)

    def asked_of(self, instance: int) -> Holdings:
        """Return what a server is asked to load; the same until it holds that."""
        return self._recovery.asked_of(instance)

    def pending(self, instance: int) -> int:
        """Return for how many experts of a draining server another holder is to be expected."""
        member = self._roster.live.get(instance)
        if member is None or member.announcement.state != "draining":
            return 0
        # a monitor that has just come back knows too little to let anybody go
        held = member.announcement.num_held
        return held if self.waiting else self._recovery.pending(member)

    @property
    def not_ready(self) -> str:
        """Why the cluster cannot serve, or an empty string when it can."""
        if self.model is None:
            return "no server has announced a model"
        missing = len(self.missing())
        if missing:
            return f"experts without a live holder: {missing}"
        if self.waiting:
            return "the monitor has restarted and waits for members to announce themselves"
        return ""

    @property
    def ready(self) -> bool:
        """Whether every expert has a live holder and the placement says so."""
        return not self.not_ready

    def join(
        self, announcement: Announcement, known: Known, now: float, *, takeover: bool = True
    ) -> Member:
        """Take in a member, in place of an older life of the same name.

        Args:
            announcement: What it says of itself.
            known: The newest placement it has seen, from whatever monitor.
            now: The time.
            takeover: Whether it may take the place of a live member of its name.

        Raises:
            ConfigError: It does not fit the live members; the text says why.
        """
        self._advance(now)
        rival = self._roster.rival(announcement)
        if rival is not None and not takeover:
            raise ConfigError(f"another live {rival} has taken the name {announcement.name}")
        if announcement.role == "server":
            check_holdings(announcement)
            check_same_model(announcement, (m.announcement for m in self.servers))
            self.model = announcement.model or self.model
        self._hear(known, now)
        if rival is not None:
            self._roster.retire(rival)
            self._note("replace", f"{rival} is replaced by a new life", now)
        member = self._roster.add(announcement, known, now, now + self._lease)
        self._note("join", f"{member} joins", now)
        self._publish(now, changed=True)
        return member

    def heartbeat(self, beat: Heartbeat, now: float) -> Status:
        """Renew a member's lease and take what has changed.

        Raises:
            ConfigError: It reports holdings that its model does not have; the lease is renewed.
        """
        self._advance(now)
        member = self._roster.live.get(beat.instance)
        if member is None:
            return "gone" if self._roster.is_replaced(beat.instance) else "unknown"
        member.seen_at, member.deadline = now, now + self._lease
        member.known = beat.known
        self._hear(beat.known, now)
        old = member.announcement
        if beat.progress != old.progress:
            member.progress_at = now
        new = replace(
            old,
            state=beat.state,
            room=beat.room,
            progress=beat.progress,
            counters=beat.counters,
            holdings=old.holdings if beat.holdings is None else beat.holdings,
        )
        if beat.holdings is not None and new.role == "server":
            check_holdings(new)
        member.announcement = new
        if beat.trouble:
            self._note("trouble", f"{member} could not load: {beat.trouble}", now)
            self._recovery.refuse(beat.instance, now)
        changed = new.state != old.state or new.holdings != old.holdings
        if changed:
            self._note("change", f"{member} is {new.state}, experts held: {new.num_held}", now)
        self._publish(now, changed=changed)
        return "ok"

    def leave(self, instance: int, now: float) -> bool:
        """Take a member out at its own wish; return whether it was there."""
        self._advance(now)
        member = self._roster.forget(instance)
        if member is not None:
            self._recovery.forget(instance)
            self._note("leave", f"{member} leaves", now)
        self._publish(now, changed=member is not None)
        return member is not None

    def tick(self, now: float) -> None:
        """Suspect members whose lease has passed; to be called every ``tick_seconds``.

        A suspect server stays in the placement while it holds what no other live server does: a
        client may still reach it. After ``_GONE_AFTER`` leases it counts as gone.
        """
        self._advance(now)
        expired = [member for member in self._roster.live.values() if member.deadline < now]
        for member in expired:
            self.leases_expired += 1
            self._roster.retire(member)
            self._note("expire", f"{member} was silent for {now - member.seen_at:.1f} s", now)
        lost = [m for m in self._roster.hopes if now > m.deadline + (_GONE_AFTER - 1) * self._lease]
        for member in lost:
            member.gone = True
            self._recovery.forget(member.announcement.instance)
        self._watch(now)
        self._publish(now, changed=bool(expired or lost))

    def _watch(self, now: float) -> None:
        """Note the servers whose heartbeats come while their serving loop stands still."""
        for member in self.servers:
            stuck = now - member.progress_at > self._lease
            if stuck and not member.stuck:
                self._note("stuck", f"{member} is alive and makes no progress", now)
            member.stuck = stuck

    def _advance(self, now: float) -> None:
        """Extend all leases by a time in which the monitor itself did not run."""
        gap, self._last = now - self._last, now
        # well above a late tick, and less than what a lease has left after a missed heartbeat
        if gap <= 0.4 * self._lease:
            return
        for member in (*self._roster.live.values(), *self._roster.hopes):
            member.deadline += gap
            member.progress_at += gap
        self._terms.extend(gap)
        self._recovery.extend(gap)
        if self._roster.live:
            self._note("suspend", f"the monitor itself stood still for {gap:.1f} s", now)

    def _hear(self, known: Known, now: float) -> None:
        if self._terms.hear(known, now):
            told = f"a member knows placement {known.term}.{known.version} of another monitor"
            self._note("wait", f"{told}; nothing is decided for a lease", now)

    def _note(self, kind: str, text: str, now: float) -> None:
        self.log.add(kind, text, now, self.placement.order)

    def _publish(self, now: float, *, changed: bool) -> None:
        """Make a new placement if there is a reason to and nothing has to be waited for."""
        if changed:
            self._compose(now)
        resumed = self._terms.settle(now)
        if self.waiting:
            return
        self._plan(now)
        if not (resumed or changed):
            return
        servers = self._composed.servers
        if resumed or self.placement.term == 0 or servers != self.placement.servers:
            term, version = self._terms.next()
            self.placement = Placement(servers, version, term)
            self._note("placement", f"placement {term}.{version}, servers: {len(servers)}", now)

    def _plan(self, now: float) -> None:
        """Ask servers with room for the experts that nobody holds who is going to stay."""
        for kind, text in self._recovery.plan(self.servers, now):
            self._note(kind, text, now)

    def _compose(self, now: float) -> None:
        """Put together what the live servers hold, and suspects that hold what no other does."""
        live = Placement(tuple(m.announcement.server_info() for m in self.servers))
        self._recovery.follow(self.model, live, now)
        if self.model is None:
            self._missing = []
        else:
            self._missing = live.missing(self.model.layers, self.model.num_experts)
        uncovered = set(self._recovery.uncovered)
        suspects = {
            member.announcement.name: replace(member.announcement.server_info(), state="suspect")
            for member in self._roster.hopes
            if member.announcement.model == self.model
            and not uncovered.isdisjoint(pairs_of(member.announcement.holdings))
        }
        servers = sorted((*live.servers, *suspects.values()), key=lambda server: server.name)
        self._composed = Placement(tuple(servers))
