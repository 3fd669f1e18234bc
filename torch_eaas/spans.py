"""Spans for ``torch.profiler``, by layer and micro-batch; they cost nothing while none runs.

A client's spans are ``eaas::dispatch/L3/mb0``, ``eaas::wait/L3/mb0`` and ``eaas::sum/L3/mb0``, a
server's ``eaas::experts/L3``. Requests leave marks without length, the same id at both ends:
``eaas::send/ID`` and ``eaas::read/ID`` at the client, ``eaas::take/ID`` and ``eaas::reply/ID`` at
the server. ``torch-eaas merge-traces`` finds the clocks' offsets by them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

PREFIX = "eaas::"

_NOTHING = nullcontext()


def is_profiling() -> bool:
    """Return whether a profiler runs in this process, in whatever thread."""
    # torch sets this flag for its own hooks; without it nothing is recorded, and nothing breaks
    return bool(getattr(profiler, "_is_profiler_enabled", False))


def span(what: str, layer: int, micro_batch: int) -> AbstractContextManager[Any]:
    """Return a context whose length is recorded if a profiler runs."""
    if not is_profiling():
        return _NOTHING
    return profiler.record_function(f"{PREFIX}{what}/L{layer}/mb{micro_batch}")


def experts_span(layers: set[int]) -> AbstractContextManager[Any]:
    """Return the same for a server's batch of some layers."""
    if not is_profiling():
        return _NOTHING
    return profiler.record_function(f"{PREFIX}experts/L{'+'.join(map(str, sorted(layers)))}")


def mark(what: str, server: str, instance: int, epoch: int, slot: int, sequence: int) -> None:
    """Record that something happened to a request; ask ``is_profiling`` first."""
    request = f"{server}/{instance:016x}.{epoch}.{slot}.{sequence}"
    with profiler.record_function(f"{PREFIX}{what}/{request}"):
        pass
