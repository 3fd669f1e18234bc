"""What a modelled server may do: it scans, serves, and keeps its pairs, as the real one.

It stands for ``server_pairs.py``, ``server_batch.py`` and ``server_control.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.exploring import BrokenPromise, Step
from tests.protocol.modelled import (
    BUDGET,
    CRASHED,
    EXITED,
    HUNG,
    LONG,
    UP,
    State,
    Where,
)
from torch_eaas.errors import StalePeer
from torch_eaas.protocol.layout import Status


def server_steps(state: State, s: int) -> Iterator[Step]:
    """Yield what a server may do next."""
    server = state.servers[s]
    if server.state == CRASHED:
        yield from state.step(exit_server, s)
    elif server.state == EXITED:
        yield from state.step(restart, s)
    elif server.state == UP:
        yield from state.step(hang, s)
        yield from state.step(crash, s)
        yield from state.step(suspend, s)
        for where, window in state.windows.items():
            if (where.server, where.life) == (s, server.life):
                if window.hello and (state.plan.answers_handshake_early or _is_quiet(state, where)):
                    yield from state.step(accept, where)
                if window.close and not window.reply.posted:
                    yield from state.step(close, where)
                if window.server is not None:
                    yield from window_steps(state, where)


def window_steps(state: State, where: Where) -> Iterator[Step]:
    """Yield what a server may do next with one window."""
    window = state.windows[where]
    assert window.server is not None
    clock = state.servers[where.server].clock
    if (window.saw, window.saw_at) != (window.request.words, clock):
        yield from state.step(scan, where)
    if window.server.num_ready:
        yield from state.step(serve, where)
    if state.client_lives(where):
        yield from state.step(lease, where)
    else:
        yield from state.step(drop, where)


def _older(state: State, where: Where) -> list[Where]:
    """Return the other windows of a pair that the server may write into."""
    windows = state.windows.items()
    return [w for w, old in windows if w[:4] == where[:4] and old.server is not None]


def _is_quiet(state: State, where: Where) -> bool:
    """Return whether the server has written for the last time into all older windows."""
    return not any(state.windows[other].reply.posted for other in _older(state, where))


# -- the data path -----------------------------------------------------------------------------


def scan(state: State, where: Where) -> None:
    """Look at a window's words."""
    window = state.windows[where]
    assert window.server is not None
    window.saw, window.saw_at = window.request.words, state.servers[where.server].clock
    window.server.scan(window.saw, window.saw_at)


def serve(state: State, where: Where) -> None:
    """Take a request, check it, run it, and post the answer."""
    window, plan = state.windows[where], state.plan
    assert window.server is not None
    slot, word, since = window.server.take()
    cells = window.request.cells[slot]
    status, clock = (
        _check(state, where, cells.header, word, since),
        state.servers[where.server].clock,
    )
    if status is Status.OK:
        if cells.header[3] != cells.payload:
            raise BrokenPromise(f"a server runs {cells.payload} for {cells.header[3]}")
        if clock - window.landed_at[slot] > BUDGET:
            raise BrokenPromise("a server runs what nobody has waited for since long")
    elif status is plan.spoiled and plan.drops_bad_frames:
        return
    payload = cells.payload if status is Status.OK else None
    header = (where.instance, where.epoch, word >> 8, status)
    window.reply.post(plan, slot, payload, header, window.server.reply_word(word))


def _check(
    state: State,
    where: Where,
    header: tuple[int, int, int, object, str] | None,
    word: int,
    since: float,
) -> Status:
    if header is None or header[:3] != (where.instance, where.epoch, word >> 8):
        return Status.STALE
    if header[4] == "bad":
        return Status.BAD_REQUEST
    late = state.servers[where.server].clock - since > BUDGET
    return Status.EXPIRED if late else Status.OK


# -- pairs -------------------------------------------------------------------------------------


def accept(state: State, where: Where) -> None:
    """Answer a handshake, once nothing is written into older windows any more."""
    server, window = state.servers[where.server], state.windows[where]
    window.hello = False
    try:
        server.epochs.accept(where.instance, where.epoch)
    except StalePeer:
        window.is_refused = True
        return
    for other in _older(state, where):
        _revoke(state, other)
    window.server = state.plan.server_book(state.plan.slots, server.clock)
    window.saw_at = server.clock


def close(state: State, where: Where) -> None:
    """Write no more into a window that its client has retired."""
    state.windows[where].close = False
    _revoke(state, where)


def drop(state: State, where: Where) -> None:
    """See that a client's process has ended."""
    _revoke(state, where)


def lease(state: State, where: Where) -> None:
    """Take a client for dead that has not been heard of for long: it may be alive and well."""
    state.spend("lease")
    _revoke(state, where)
    state.windows[where].request.is_mapped = False


def _revoke(state: State, where: Where) -> None:
    window = state.windows[where]
    window.server, window.is_revoked = None, True


# -- the process -------------------------------------------------------------------------------


def suspend(state: State, s: int) -> None:
    """The process stood still for long."""
    state.spend("suspend")
    state.servers[s].clock += LONG


def hang(state: State, s: int) -> None:
    """The process does nothing any more, and nothing confirms that it has ended."""
    state.spend("hang")
    state.servers[s].state = HUNG


def crash(state: State, s: int) -> None:
    """The process ends; what it has posted is still under way."""
    state.spend("crash")
    server = state.servers[s]
    server.state, server.epochs, server.clock = CRASHED, state.plan.epochs(), 0
    for where, window in state.windows.items():
        if where.server == s:
            window.server, window.hello, window.close = None, False, False


def exit_server(state: State, s: int) -> None:
    """The kernel confirms the end: what has not landed by now never will."""
    state.servers[s].state = EXITED
    for where, window in state.windows.items():
        if where.server == s:
            window.reply.posted = []


def restart(state: State, s: int) -> None:
    state.spend("restart")
    state.servers[s].state = UP
    state.servers[s].life += 1
