"""A bounded log of what happened, whose ids let a listener resume where it stopped."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch_eaas.monitor.announcement import instance_text


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    number: int
    """Counts from 1 in each life of the monitor."""

    kind: str
    """``join``, ``leave``, ``expire``, ``replace``, ``change``, ``placement``, ``suspend``, ..."""

    text: str
    """One line for people."""

    at: float
    """When, on the monitor's clock."""

    order: tuple[int, int]
    """Term and version of the placement at that time."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object without the time, which only the monitor's clock can read."""
        term, version = self.order
        return {"kind": self.kind, "text": self.text, "term": term, "version": version}


class EventLog:
    """The last events of one monitor.

    Args:
        instance: The monitor's instance id; ids of another one's events are not resumed from.
        capacity: How many events are kept.
    """

    def __init__(self, instance: int, capacity: int = 512) -> None:
        self._prefix = instance_text(instance)
        self._events: deque[Event] = deque(maxlen=capacity)
        self.last = 0

    def add(self, kind: str, text: str, at: float, order: tuple[int, int]) -> None:
        """Append an event."""
        self.last += 1
        self._events.append(Event(self.last, kind, text, at, order))

    def since(self, number: int) -> list[Event]:
        """Return the events after ``number`` that are still kept, oldest first."""
        # the newest are at the end, and mostly few are asked for
        newer = itertools.takewhile(lambda event: event.number > number, reversed(self._events))
        return list(newer)[::-1]

    def recent(self, count: int) -> list[Event]:
        """Return the last events, newest first."""
        return list(itertools.islice(reversed(self._events), count))

    def event_id(self, number: int) -> str:
        """Return the id of an event as listeners see it."""
        return f"{self._prefix}-{number}"

    def resume(self, event_id: str) -> int | None:
        """Return the number to go on from, or None if events after that id are lost or unknown."""
        prefix, _, digits = event_id.partition("-")
        if prefix != self._prefix or not digits.isdecimal() or len(digits) > 18:
            return None
        number = int(digits)
        oldest = self._events[0].number if self._events else 1
        return number if oldest - 1 <= number <= self.last else None
