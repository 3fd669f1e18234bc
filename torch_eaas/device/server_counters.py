"""What a device server has done, as the host knows it: a copy that comes now and then."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from torch_eaas.device.stream import DeviceStream, pinned_like
from torch_eaas.ops.answer_counts import Count
from torch_eaas.protocol.layout import Status


class DeviceCounters:
    """Copies the device's counters into pinned memory without waiting for them.

    Args:
        counters_C: The device's, in the order of ``Count``.
        stream: Where they are added to.
        numbers: What is brought up to date, under the names of a host-driven server.
    """

    def __init__(self, counters_C: Tensor, stream: DeviceStream, numbers: Counter[str]) -> None:
        self._counters_C = counters_C
        self._stream = stream
        self._numbers = numbers
        self._copy_C = pinned_like(counters_C)
        self._copied = stream.mark()
        self._is_under_way = False
        self.iterations = 0
        """Iterations that had ended by the last copy."""
        self.answered = 0
        """Requests answered, with whatever status."""

    def ask(self) -> None:
        """Enqueue a copy, unless one is under way."""
        if not self._is_under_way:
            self._copy_C.copy_(self._counters_C, non_blocking=True)
            self._copied = self._stream.mark()
            self._is_under_way = True

    def hear(self) -> None:
        """Take over a copy that has come."""
        if not (self._is_under_way and self._copied.is_passed):
            return
        self._is_under_way = False
        values: list[int] = self._copy_C.tolist()
        by_status = dict(zip(Status, values[Count.STATUSES :], strict=True))
        answered = by_status.pop(Status.OK)
        refused = sum(by_status.values())
        self.iterations = values[Count.ITERATIONS]
        self.answered = answered + refused
        self._numbers["requests"] = answered
        self._numbers["tokens"] = values[Count.TOKENS]
        self._numbers["batches"] = values[Count.BATCHES]
        self._numbers["experts_us"] = values[Count.EXPERTS_US]
        if refused:
            self._numbers["refused"] = refused
        for status, count in by_status.items():
            if count:
                self._numbers[f"refused_{status.name.lower()}"] = count
