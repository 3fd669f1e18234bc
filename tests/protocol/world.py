"""The modelled world as a whole: its steps, the writes that land, and what must always hold."""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.client_moves import client_steps
from tests.protocol.exploring import BrokenPromise, Step
from tests.protocol.modelled import (
    FAULTS,
    HEADER,
    HUNG,
    UP,
    WORD,
    Memory,
    Plan,
    State,
    Where,
    Write,
)
from tests.protocol.pair_moves import hello, see_handshake
from tests.protocol.server_moves import accept, server_steps, window_steps
from torch_eaas.protocol.layout import Status


class World(State):
    """Clients, servers and windows, and everything that may happen to them."""

    def steps(self) -> Iterator[Step]:
        """Yield what may happen next."""
        if self.plan.reduced and (only := self.only_step()) is not None:
            yield only
            return
        for c in range(self.plan.clients):
            yield from client_steps(self, c)
        for s in range(self.plan.servers):
            yield from server_steps(self, s)
        for where, window in self.windows.items():
            for number in window.request.may_land():
                yield from self.step(land_request, where, number)
                if any(part == HEADER for part, _ in window.request.posted[number].cells):
                    yield from self.step(spoil, where, number)
            for number in window.reply.may_land():
                yield from self.step(land_reply, where, number)

    def only_step(self) -> Step | None:
        """Return a step that others neither notice nor hinder, nor does it hinder them.

        Whatever else may happen leads to the same worlds before it as after it, so it is enough to
        take it first. Once no fault is left but late clocks, that is so on a request's way until
        its answer is posted: its client sees nothing of it, and no other window has a part in it.
        The answer's landing is no such step: its client may act on it, or wait no longer. Where
        frames land in pieces, or a window has several slots, their order matters.
        """
        plan = self.plan
        if plan.slots > 1 or plan.pieces > 1 or any(self.left[fault] for fault in FAULTS):
            return None
        if any(client.state != UP for client in self.clients):
            return None
        if any(window.hello or window.close for window in self.windows.values()):
            return None
        for where, window in self.windows.items():
            server = self.servers[where.server]
            if window.saw_at != server.clock and server.state == UP:
                # after a suspension it matters what lands before the first look
                continue
            for number in window.request.may_land():
                return Step(land_request, (where, number))
            if window.server is not None and server.state == UP:
                for step in window_steps(self, where):
                    return step
        return None

    def check(self) -> None:
        """Give memory back as soon as that is allowed; check that no slot has two owners."""
        for where, window in list(self.windows.items()):
            if self._is_over(where):
                del self.windows[where]
            elif window.client is not None and self._is_up(where):
                held = self.held(where)
                if len(held) != window.client.num_in_use or len(set(held)) != len(held):
                    raise BrokenPromise("a slot is lost or has two owners")

    def check_end(self) -> None:
        """Check that all was asked and ended, and that no slot and no window was lost."""
        for c, client in enumerate(self.clients):
            if client.state == UP:
                if client.share is not None or client.asked < self.plan.asks:
                    raise BrokenPromise(f"request {client.asked} of client {c} has not ended")
                for s, server in enumerate(self.servers):
                    if server.state == UP:
                        self._check_pair(c, s)
        for where in self.windows:
            # what a server that hangs may write into never comes back
            hangs = self.servers[where.server].state == HUNG
            if not hangs and not (self.is_open(where) and self.server_lives(where)):
                raise BrokenPromise(f"the memory of window {where} does not come back")

    def _is_up(self, where: Where) -> bool:
        return self.client_lives(where) and self.clients[where.client].state == UP

    def _check_pair(self, c: int, s: int) -> None:
        where = self.open_window(c, s)
        if where is None or self.windows[where].server is None:
            raise BrokenPromise(f"the pair of client {c} and server {s} is not open at both ends")
        book = self.windows[where].client
        if book is None or book.num_free != self.plan.slots:
            raise BrokenPromise(f"a slot of client {c} at server {s} is lost")

    def _is_over(self, where: Where) -> bool:
        """Return whether nobody uses a window; its memory goes back at the first moment it may."""
        window = self.windows[where]
        client_uses = self.client_lives(where) and (
            self.is_open(where)
            or self.clients[where.client].attempts.get(where.server) == where
            or self.held(where) != []
        )
        if client_uses:
            return False
        revoked = window.is_revoked or window.is_refused or not self.server_lives(where)
        revoked |= self.plan.lease_is_death and window.is_retired
        if self.client_lives(where) and revoked:
            window.reply.is_mapped = False
        under_way = window.request.posted or window.reply.posted or window.hello or window.close
        return not under_way and window.server is None


def opened(plan: Plan) -> World:
    """Return a world in which every pair is open, which spares the search the handshakes."""
    world = World(plan)
    for c in range(plan.clients):
        for s in range(plan.servers):
            hello(world, c, s)
            accept(world, world.clients[c].attempts[s])
            see_handshake(world, c, s)
    return world


def _land(memory: Memory, number: int) -> Write:
    write = memory.posted.pop(number)
    if not memory.is_mapped:
        raise BrokenPromise("a late write lands in memory that was given back")
    memory.cells[write.slot] = memory.cells[write.slot]._replace(**dict(write.cells))
    return write


def land_request(world: World, where: Where, number: int) -> None:
    """A client's write becomes visible to its server."""
    window = world.windows[where]
    write = _land(window.request, number)
    slot, first = write.slot, write.cells[0][0]
    if write.cells[-1][0] == WORD:
        window.landed_at[slot] = world.servers[where.server].clock
    # the server may read from the moment it saw a word until its own word has landed
    saw, answered = window.saw[slot] >> 8, window.reply.words[slot] >> 8
    if first != WORD and window.server is not None and saw != answered:
        raise BrokenPromise(f"a request's {first} is written while the server may read it")


def land_reply(world: World, where: Where, number: int) -> None:
    """A server's write becomes visible to its client."""
    window = world.windows[where]
    slot, cells = window.reply.posted[number][1:]
    book, first, word = window.client, cells[0][0], window.reply.words[slot]
    # the client may read from the moment the word has landed until it frees the slot
    is_read = book is not None and slot in world.held(where) and book.answered(slot, word)
    if first != WORD and is_read:
        raise BrokenPromise(f"an answer's {first} is written while the client may read it")
    _land(window.reply, number)


def spoil(world: World, where: Where, number: int) -> None:
    """A client's frame turns out bad."""
    world.spend("spoil")
    window = world.windows[where]
    write = window.request.posted[number]
    instance, epoch, sequence, payload, _ = dict(write.cells)[HEADER]
    is_stale = world.plan.spoiled is Status.STALE
    bad = (instance, 0 if is_stale else epoch, sequence, payload, "" if is_stale else "bad")
    cells = tuple((part, bad if part == HEADER else value) for part, value in write.cells)
    window.request.posted[number] = write._replace(cells=cells)
    world.clients[where.client].was_spoiled = True
