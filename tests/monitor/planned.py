"""A cluster on a planned clock, and short ways to say who announces what."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch_eaas.config import MonitorConfig
from torch_eaas.monitor.announcement import Announcement, Heartbeat, Known, ModelInfo, Status
from torch_eaas.monitor.members import Members
from torch_eaas.placement import Holdings

LEASE = 5.0
MONITOR = 0xAAAA
OTHER = 0xBBBB
NOTHING = Known()
MODEL = ModelInfo(fingerprint="tiny", layers=(1, 2), num_experts=3)
ALL: Holdings = {1: (0, 1, 2), 2: (0, 1, 2)}

FAST = MonitorConfig(heartbeat=timedelta(seconds=0.05), lease=timedelta(seconds=0.4))
"""For tests in real time."""


def server(name: str, instance: int, holdings: Holdings = ALL, **more: Any) -> Announcement:
    more.setdefault("address", f"unix:@{name}")
    more.setdefault("model", MODEL)
    return Announcement(role="server", name=name, instance=instance, holdings=holdings, **more)


def client(name: str, instance: int, **more: Any) -> Announcement:
    return Announcement(role="client", name=name, instance=instance, **more)


class Cluster:
    """Members and a clock that ticks as time passes."""

    def __init__(self, start: float = 1000.0) -> None:
        self.now = start
        self.members = Members(MonitorConfig(), MONITOR, start)

    def join(self, said: Announcement, known: Known = NOTHING, *, takeover: bool = True) -> None:
        self.members.join(said, known, self.now, takeover=takeover)

    def beat(self, instance: int, **more: Any) -> Status:
        return self.members.heartbeat(Heartbeat(instance=instance, **more), self.now)

    def leave(self, instance: int) -> bool:
        return self.members.leave(instance, self.now)

    def pass_time(self, seconds: float, beating: tuple[int, ...] = ()) -> None:
        """Tick every half second; whoever is beating sends a heartbeat before each tick."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.5, end)
            for instance in beating:
                self.beat(instance)
            self.members.tick(self.now)

    @property
    def order(self) -> tuple[int, int]:
        return self.members.placement.order

    @property
    def names(self) -> list[str]:
        return [s.name for s in self.members.placement.servers]

    @property
    def states(self) -> dict[str, str]:
        return {s.name: s.state for s in self.members.placement.servers}

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.members.log.since(0)]


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Return once a condition holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds:g} s"
        time.sleep(0.005)
