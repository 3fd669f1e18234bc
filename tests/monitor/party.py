"""Members with agents, whose announcements can be changed and whose placements are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from torch_eaas.monitor.agent import Announcement, MonitorAgent
from torch_eaas.monitor.link import MonitorLink
from torch_eaas.placement import Placement

SHORT = timedelta(seconds=1)


class Party:
    """A member with an agent: what it announces can be changed, what it is told is kept."""

    def __init__(self, url: str, said: Announcement) -> None:
        self.said = said
        self.placements: list[Placement] = []
        self.threads: list[int] = []
        self.agent = MonitorAgent(url, lambda: self.said, self._take)

    def _take(self, placement: Placement) -> None:
        self.placements.append(placement)
        self.threads.append(threading.get_ident())

    @property
    def names(self) -> list[str]:
        return [s.name for s in self.placements[-1].servers] if self.placements else []

    @property
    def orders(self) -> list[tuple[int, int]]:
        return [placement.order for placement in self.placements]


Start = Callable[[str, Announcement], Party]


def members(url: str, role: str) -> list[str]:
    """Return the labels of the servers, clients or suspects that a monitor shows."""
    with MonitorLink(url, SHORT) as link:
        return [member["label"] for member in link.call("GET", "/members")[role]]
