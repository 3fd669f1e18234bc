"""The tickets of a client's dispatches: each stands for a call under way, and is used up once."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from torch_eaas.client_turns import Turn
from torch_eaas.errors import ConfigError

BLOCK = 64
"""Tickets made at once: one tensor costs as much as many."""


class UnderWay(Protocol):
    """A call between dispatch and combine."""

    ticket: weakref.ref[Tensor] | None
    """What the caller combines by; once it is gone, nobody will."""
    turn: Turn | None
    """Who dispatched it."""

    def release(self) -> None:
        """Give up what the call still has of slots."""
        ...


C = TypeVar("C", bound=UnderWay)


class Tickets(Generic[C]):
    """Calls under way, by the number in their ticket; whoever dispatches or combines may ask."""

    def __init__(self) -> None:
        self._calls: dict[int, C] = {}
        self._unused: deque[tuple[int, Tensor]] = deque()
        self._next_block = itertools.count(1, BLOCK)

    def __len__(self) -> int:
        return len(self._calls)

    def issue(self, call: C) -> Tensor:
        """Return a new ticket for a call, an int64 tensor of one element."""
        number, ticket = self._next()
        call.ticket = weakref.ref(ticket)
        self._calls[number] = call
        return ticket

    def redeem(self, ticket: Tensor) -> C:
        """Return a ticket's call and use the ticket up; ConfigError if it is used up already."""
        # not by torch's means of reading a device: where those are forbidden, this is none
        number = int(ticket.numpy()[0])
        call = self._calls.pop(number, None)
        if call is None:
            raise ConfigError(f"ticket {number} is not under way; combine takes each one once")
        return call

    def forget_dropped(self) -> None:
        """Give up the calls whose ticket nobody has any more."""
        for number, call in list(self._calls.items()):
            if call.ticket is not None and call.ticket() is None:
                self._give_up(number)

    def give_up(self, turn: Turn) -> None:
        """Give up the calls that a micro-batch dispatched."""
        for number, call in list(self._calls.items()):
            if call.turn is turn:
                self._give_up(number)

    def close(self) -> None:
        """Give up all calls."""
        for number in list(self._calls):
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        # another thread may have come first
        call = self._calls.pop(number, None)
        if call is not None:
            call.release()

    def _next(self) -> tuple[int, Tensor]:
        """Return a number that was never used, and its tensor."""
        while True:
            try:
                return self._unused.popleft()
            except IndexError:
                # two threads may both come here: then there are two blocks
                start = next(self._next_block)
                block = torch.arange(start, start + BLOCK, device="cpu").view(BLOCK, 1).unbind()
                self._unused.extend(enumerate(block, start))
