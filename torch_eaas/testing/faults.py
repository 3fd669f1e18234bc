"""Planned faults: what a server does wrong, at which request and at which step of the protocol."""

from __future__ import annotations

import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from torch_eaas.config import check_at_least, check_choice, check_positive
from torch_eaas.errors import ConfigError
from torch_eaas.protocol.layout import REPLY_FIELDS, Status, field_offsets
from torch_eaas.server import ExpertServer
from torch_eaas.server_pairs import Frame, ServerPair

FaultKind = Literal["crash", "delay", "duplicate", "drop", "suspend", "bad"]
"""What happens at the planned step.

``crash``: the server's endpoint closes, and nothing is written any more. ``delay``: the step takes
``delay`` longer. ``suspend``: the same, and nobody can open a pair meanwhile. ``drop``: the
request is never answered. ``duplicate``: what is written from this step on is written twice.
``bad``: the request is refused with INTERNAL; once rows are written, the header is another
window's.
"""

_EPOCH_OFFSET = field_offsets(REPLY_FIELDS)["epoch"]


class Step(Enum):
    """How far a server has come with a request; docs/protocol.md, section 5."""

    WORD_SEEN = "word seen"
    HEADER_READ = "header read"
    PAYLOAD_READ = "payload read"
    COMPUTED = "computed"
    PAYLOAD_WRITTEN = "payload written"
    HEADER_WRITTEN = "header written"
    WORD_WRITTEN = "word written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, which happens once."""

    server: int
    """Which server of the cluster, from 0."""

    request: int
    """At which of the requests that this server takes, from 1."""

    step: Step
    """After which step."""

    kind: FaultKind
    """What happens."""

    delay: timedelta = timedelta(milliseconds=50)
    """How long a ``delay`` or ``suspend`` lasts."""

    def __post_init__(self) -> None:
        check_at_least("server", self.server, 0)
        check_at_least("request", self.request, 1)
        check_choice("kind", self.kind, FaultKind)
        check_positive("delay", self.delay)


class FaultPlan:
    """Makes servers of this process fail as planned, and says what has happened.

    Args:
        faults: What is to happen, in any order; at most one for each server, request and step.

    Raises:
        ConfigError: Two faults have the same place.

    Example::

        fault = Fault(server=0, request=2, step=Step.COMPUTED, kind="crash")
        plan = FaultPlan([fault])
        with LocalCluster(weights, servers=2, copies=2, plan=plan) as cluster:
            ...
        assert plan.fired == [fault]
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.fired: list[Fault] = []
        """What has happened so far, in this order."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._planned = {(fault.server, fault.request, fault.step): fault for fault in faults}
        if len(self._planned) < len(faults):
            raise ConfigError(
                f"a plan has one fault for each server, request and step, got {len(faults)} faults "
                f"for {len(self._planned)} places; let one of them come a step later"
            )
        self._taken: Counter[int] = Counter()
        self._suspended: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def attach(self, server: ExpertServer, index: int) -> None:
        """Let a server fail as planned for number ``index``; before any client has come."""
        server._control.make_pair = partial(_FailingPair, _Script(self, server, index))

    def end(self) -> None:
        """Let nothing more happen; who is delayed or suspended goes on at once."""
        self._ended.set()

    def requests(self, index: int) -> int:
        """Return how many requests a server has taken."""
        with self._lock:
            return self._taken[index]


class _Script:
    """A plan as one of its servers follows it."""

    def __init__(self, plan: FaultPlan, server: ExpertServer, index: int) -> None:
        self._plan = plan
        self._server = server
        self._index = index
        self.has_crashed = False

    def next_request(self) -> int:
        """Return the number of a request that the server takes now."""
        with self._plan._lock:
            self._plan._taken[self._index] += 1
            return self._plan._taken[self._index]

    def play(self, request: int, step: Step) -> FaultKind | None:
        """Do what is planned after a step; return what the pair has to do itself."""
        plan = self._plan
        with plan._lock:
            fault = plan._planned.pop((self._index, request, step), None)
            if fault is None or plan._ended.is_set():
                return None
            plan.fired.append(fault)
        if fault.kind == "crash":
            self.has_crashed = True
            # the pairs end first, so that the thread, as it leaves, finds nobody to answer
            self._server._listener.close()
            self._server._stop.set()
        elif fault.kind == "delay":
            plan._ended.wait(fault.delay.total_seconds())
        elif fault.kind == "suspend":
            with plan._suspended[self._index]:
                plan._ended.wait(fault.delay.total_seconds())
        else:
            return fault.kind
        return None

    def await_resumption(self) -> None:
        """Wait until the server is not suspended."""
        with self._plan._suspended[self._index]:
            pass


class _FailingPair(ServerPair):
    """A pair that follows a script; ``_acting`` is what a slot's request still has to suffer."""

    def __init__(self, script: _Script, **pair: Any) -> None:
        script.await_resumption()
        super().__init__(**pair)
        self._script = script
        self._numbers: dict[int, int] = {}
        self._acting: dict[int, FaultKind] = {}

    @override
    def read(self, slot: int, word: int, since: float, now: float) -> Frame:
        self._acting.pop(slot, None)
        self._numbers[slot] = self._script.next_request()
        self._passed(Step.WORD_SEEN, slot)
        frame = super().read(slot, word, since, now)
        self._passed(Step.PAYLOAD_READ, slot)
        return frame

    @override
    def _read_header(self, slot: int, word: int, since: float, now: float) -> tuple[int, int]:
        header = super()._read_header(slot, word, since, now)
        self._passed(Step.HEADER_READ, slot)
        return header

    @override
    def answer(
        self, frame: Frame, rows: Tensor, *, queue_us: int, experts_us: int, version: int
    ) -> None:
        slot = frame.slot
        self._passed(Step.COMPUTED, slot)
        if self._acting.get(slot) == "bad":
            del self._acting[slot]
            self.refuse(slot, frame.word, Status.INTERNAL, "a planned fault", version=version)
        elif not self._is_silent(slot):
            for _ in range(self._times(slot)):
                super().answer(
                    frame, rows, queue_us=queue_us, experts_us=experts_us, version=version
                )

    @override
    def _finish(self, slot: int, word: int, *header: Any) -> None:
        self._passed(Step.PAYLOAD_WRITTEN, slot)
        if not self._is_silent(slot):
            for _ in range(self._times(slot)):
                super()._finish(slot, word, *header)

    @override
    def _store_word(self, slot: int, word: int) -> None:
        self._passed(Step.HEADER_WRITTEN, slot)
        if self._is_silent(slot):
            return
        if self._acting.get(slot) == "bad":
            self._garble(slot)
        for _ in range(self._times(slot)):
            super()._store_word(slot, word)
        self._passed(Step.WORD_WRITTEN, slot)
        if self._acting.get(slot) == "bad":
            self._garble(slot)
        for _ in range(self._times(slot) - 1):
            super()._store_word(slot, word)

    def _passed(self, step: Step, slot: int) -> None:
        # a request that was refused unread has no number
        kind = self._script.play(self._numbers.get(slot, 0), step)
        if kind is not None:
            self._acting[slot] = kind

    def _is_silent(self, slot: int) -> bool:
        return self._script.has_crashed or self._acting.get(slot) == "drop"

    def _times(self, slot: int) -> int:
        """Return how often to write: twice from where a duplicate was planned."""
        if self._acting.get(slot) != "duplicate":
            return 1
        del self._acting[slot]
        return 2

    def _garble(self, slot: int) -> None:
        """Put another window's epoch into a reply's header."""
        at = self._reply_at[slot] + _EPOCH_OFFSET
        struct.pack_into("<Q", self._replies, at, self.epoch + 1)
