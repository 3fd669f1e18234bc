"""How a device answers requests: one captured iteration, replayed by a host that only enqueues."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from torch_eaas.comm.transport import Transport
from torch_eaas.device.captured import Captured
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.device.puts import Puts
from torch_eaas.device.server_counters import DeviceCounters
from torch_eaas.device.server_iteration import DeviceIteration, IterationSizes
from torch_eaas.device.server_pairs import DevicePair, PairRows
from torch_eaas.device.stream import Mark, finish_all
from torch_eaas.ops.pair_table import unsigned
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.protocol.words import is_newer
from torch_eaas.server_path import DataPath

AHEAD = 2
"""Iterations that are under way at once: the device does not wait for the host, and a change waits
for no more than these."""

COUNTERS_S = 0.05
"""How often the counters are copied from a GPU."""

LONGEST_WAIT_S = 0.05
"""How long a server on a CPU rests at most before it looks whether its drain is over."""

SETTLE_S = 10.0
"""How long the iterations under way may take before the device counts as hanging."""


class DevicePath(DataPath[DevicePair]):
    """Lets a device read windows, run experts and write answers.

    Args:
        slab: The experts.
        sizes: What the iteration is captured for.
        transport: How to wait for a word on a CPU, where no kernel waits.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        slab: ExpertSlab,
        sizes: IterationSizes,
        transport: Transport,
        clock: Callable[[], float],
    ) -> None:
        self._slab, self._stream = slab, slab.stream
        self._transport = transport
        self._clock = clock
        self._puts = Puts(transport, slab.device)
        self._iteration = DeviceIteration(slab, sizes, self._puts)
        self._captured = Captured(self._iteration.run, device=slab.device, is_first=True)
        self._on_gpu = slab.device.type == "cuda"
        self._rows = PairRows(self._iteration.tables, self._iteration.puts_PQ, self._stream)
        # what was made on other streams is there before the first replay
        finish_all(slab.device)
        self._max_requests = sizes.max_pairs * sizes.spec.slots
        self._enqueuing = threading.Lock()
        self._under_way: deque[Mark] = deque()
        self._applied: tuple[DevicePair, ...] = ()
        self._counted = clock()
        self.pairs: tuple[DevicePair, ...] = ()
        self.agreed: PairSpec | None = sizes.spec
        self.counters: Counter[str] = Counter()
        self._device_counters = DeviceCounters(
            self._iteration.counters_C, self._stream, self.counters
        )
        self.version = 0
        self.last_answer = clock()
        self.progress = 0
        slab.attach(self.settle)

    @property
    @override
    def make_pair(self) -> Callable[..., DevicePair]:
        return self._make_in_old_memory if self._puts.is_needed else DevicePair

    @override
    def step(self) -> int:
        if len(self._under_way) == AHEAD:
            self._under_way.popleft().reach()
        now = self._clock()
        with self._enqueuing, self._stream.current():
            self._apply()
            self._captured.replay()
            self._under_way.append(self._stream.mark())
            if not self._on_gpu or now - self._counted >= COUNTERS_S:
                self._counted = now
                self._device_counters.ask()
        return self._hear()

    @override
    def rest(self, has_stopped: Callable[[], bool]) -> None:
        if self._on_gpu:
            # the iteration's first kernel waits
            return
        idle = self._clock() - self.last_answer
        self._transport.wait(lambda: has_stopped() or self._has_work(), LONGEST_WAIT_S, idle)

    @override
    def settle(self) -> None:
        with self._enqueuing, self._stream.current():
            self._apply()
            mark = self._stream.mark()
        # outside of the lock: iterations may follow meanwhile
        mark.wait(SETTLE_S)
        self._puts.settle()

    @override
    def finish(self) -> None:
        self._iteration.draining.wanted = torch.ones(1, dtype=torch.int32)
        for _ in range(self._max_requests):
            answered = self.step()
            # a copy of the counters that was under way may be older than this iteration
            for _ in range(2):
                with self._enqueuing, self._stream.current():
                    self._device_counters.ask()
                    mark = self._stream.mark()
                mark.wait(SETTLE_S)
                answered += self._hear()
            if not answered:
                break
        self._slab.detach()

    def _make_in_old_memory(self, **fields: Any) -> DevicePair:
        """Make a pair whose windows an earlier one of that process had."""
        self.settle()
        return DevicePair(**fields)

    def _apply(self) -> None:
        """Enqueue what has changed since the last iteration; the lock is held."""
        iteration = self._iteration
        pairs = self.pairs
        if pairs is not self._applied:
            self._rows.apply(pairs)
            self._applied = pairs
        self._rows.release()
        if self.version != int(iteration.version.wanted):
            iteration.version.wanted = torch.tensor([self.version])
        for mirror in (iteration.version, iteration.draining):
            mirror.push()
        self._slab.push()

    def _hear(self) -> int:
        """Return the requests answered, as far as a copy of the counters says so by now."""
        before = self._device_counters.answered
        self._device_counters.hear()
        answered = self._device_counters.answered - before
        self.progress = self._device_counters.iterations
        if answered:
            self.last_answer = self._clock()
            self._transport.ring()
        return answered

    def _has_work(self) -> bool:
        """Look into the windows from the host: on a CPU only, where no kernel waits for words."""
        if self.pairs is not self._applied:
            return True
        taken_PS = self._iteration.tables.book_3PS[2].tolist()
        for row, pair in self._rows.rows.items():
            words = (ctypes.c_uint64 * pair.spec.slots).from_address(pair.requests.address)
            if any(
                is_newer(*each) for each in zip(words, map(unsigned, taken_PS[row]), strict=False)
            ):
                return True
        return False
