"""The members of a cluster by instance: live ones, and past lives that may still speak up."""

from __future__ import annotations

from dataclasses import dataclass

from torch_eaas.monitor.announcement import Announcement, Known, Role

_MAX_PAST = 1024


@dataclass(slots=True)
class Member:
    """One member and when it was last heard of, on the monitor's clock."""

    announcement: Announcement
    label: str
    """Its name, with the instance id behind it where the name was taken."""
    known: Known
    """The newest placement that it has seen."""
    seen_at: float
    """Its last sign of life."""
    progress_at: float
    """When its progress last changed."""
    deadline: float
    """When its lease ends."""
    gone: bool = False
    """Whether it is known to have ended: a suspect only fell silent."""
    stuck: bool = False
    """Whether its heartbeats come while its progress stands still."""

    def __str__(self) -> str:
        return f"{self.announcement.role} {self.label}"


class Roster:
    """Live members, and a bounded memory of lives that expired or were replaced."""

    def __init__(self) -> None:
        self.live: dict[int, Member] = {}
        self._past: dict[int, Member] = {}

    def of_role(self, role: Role) -> list[Member]:
        """Return the live members of a role, by name."""
        chosen = (m for m in self.live.values() if m.announcement.role == role)
        return sorted(chosen, key=lambda m: (m.announcement.name, m.label))

    @property
    def suspects(self) -> list[Member]:
        """Servers whose lease expired and whose name no other life has taken."""
        past = (m for m in self._past.values() if m.announcement.role == "server")
        return [m for m in past if self.rival(m.announcement) is None]

    @property
    def silent_clients(self) -> list[Member]:
        """Clients whose lease expired and that have not joined again."""
        return [m for m in self._past.values() if m.announcement.role == "client"]

    @property
    def hopes(self) -> list[Member]:
        """Suspects that may still serve: none of them has had another life since."""
        return [m for m in self.suspects if not m.gone]

    def rival(self, announcement: Announcement) -> Member | None:
        """Return the live member, another instance, whose place an announcement would take.

        A server is its name. Clients may share a name, so their addresses must be equal too.
        """
        for member in self.live.values():
            other = member.announcement
            if (other.role, other.name) != (announcement.role, announcement.name):
                continue
            same = other.role == "server" or other.address == announcement.address != ""
            if same and other.instance != announcement.instance:
                return member
        return None

    def is_replaced(self, instance: int) -> bool:
        """Return whether a past life's place is taken by a live member."""
        past = self._past.get(instance)
        return past is not None and self.rival(past.announcement) is not None

    def add(self, announcement: Announcement, known: Known, now: float, deadline: float) -> Member:
        """Take in a member, or a new announcement of one that is there."""
        instance = announcement.instance
        for past in self._past.values():
            other = past.announcement
            # a new life is the proof that the old one has ended
            past.gone |= (other.role, other.name) == (announcement.role, announcement.name)
        old = self.live.pop(instance, None)
        self._past.pop(instance, None)
        label = old.label if old is not None else self._label(announcement)
        member = Member(announcement, label, known, now, now, deadline)
        self.live[instance] = member
        return member

    def retire(self, member: Member) -> None:
        """Move a live member to the past lives; the oldest of too many is forgotten."""
        instance = member.announcement.instance
        del self.live[instance]
        self._past[instance] = member
        if len(self._past) > _MAX_PAST:
            del self._past[next(iter(self._past))]

    def forget(self, instance: int) -> Member | None:
        """Drop a member that leaves, and return it if it was live or only suspected."""
        past = self._past.pop(instance, None)
        if past is not None and past.gone:
            return None
        return self.live.pop(instance, past)

    def _label(self, announcement: Announcement) -> str:
        taken = any(m.label == announcement.name for m in self.live.values())
        return f"{announcement.name}-{announcement.instance:016x}" if taken else announcement.name
