"""What a modelled client may do with its pairs: open, lose, leave them; and how its process ends.

It stands for ``connections.py``; what that decides by a clock may happen here at any time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tests.protocol.exploring import BrokenPromise, Step
from tests.protocol.modelled import CRASHED, EXITED, UP, Sent, State, Where, Window
from torch_eaas.protocol.pairs import ClientPair
from torch_eaas.protocol.requests import Fate


def pair_steps(state: State, c: int) -> Iterator[Step]:
    """Yield what a client may do next with its pairs."""
    client = state.clients[c]
    for s, server in enumerate(state.servers):
        where, attempt = state.open_window(c, s), client.attempts.get(s)
        if attempt is not None:
            window = state.windows[attempt]
            if window.is_refused or window.server or not state.server_lives(attempt):
                yield from state.step(see_handshake, c, s)
            yield from state.step(abandon, c, s)
        elif where is None and server.state == UP:
            yield from state.step(hello, c, s)
        if where is not None:
            book = state.windows[where].client
            assert book is not None
            if book.num_given_up:
                yield from state.step(reclaim, where)
            if not state.server_lives(where):
                yield from state.step(notice, where)
            if state.pair(where).suspect and book.num_in_use == 0:
                yield from state.step(retire, where)


def window_of(state: State, request: Sent) -> Window:
    """Return the window that a request lies in."""
    assert request.where is not None
    return state.windows[request.where]


def has_word(state: State, request: Sent) -> bool:
    """Return whether a request's answer has come."""
    window = window_of(state, request)
    assert window.client is not None
    return window.client.answered(request.slot, window.reply.words[request.slot])


# -- pairs -------------------------------------------------------------------------------------


def hello(state: State, c: int, s: int) -> None:
    """Make a window and ask for a handshake."""
    client, life = state.clients[c], state.servers[s].life
    pair = client.pairs.setdefault((s, life), ClientPair())
    assert pair.may_open(math.inf)
    where = Where(c, client.instance, s, life, pair.next_epoch())
    client.attempts[s] = where
    state.windows[where] = Window(state.plan.slots)


def see_handshake(state: State, c: int, s: int) -> None:
    """Open the pair if the server has accepted, or see that the attempt has failed."""
    client = state.clients[c]
    where = client.attempts[s]
    window, pair = state.windows[where], state.pair(where)
    if window.is_refused or not state.server_lives(where):
        pair.refused(0.0, 0.0)
        del client.attempts[s]
    elif window.server is not None:
        pair.opened(where.epoch)
        window.client = state.plan.client_book(state.plan.slots)
        del client.attempts[s]


def abandon(state: State, c: int, s: int) -> None:
    """Wait no longer for a handshake's answer, which may still come."""
    state.spend("abandon")
    where = state.clients[c].attempts.pop(s)
    state.pair(where).refused(0.0, 0.0)


def reclaim(state: State, where: Where) -> None:
    """Free the slots whose late answer has come."""
    window = state.windows[where]
    assert window.client is not None
    if window.client.reclaim(window.reply.words):
        state.pair(where).suspect = False


def notice(state: State, where: Where) -> None:
    """See that a server's process has ended."""
    state.pair(where).retire()
    for request in state.clients[where.client].sent():
        waits = request.fate is Fate.WAITING and request.where == where
        if waits and not has_word(state, request):
            request.fate = Fate.LOST
    if state.servers[where.server].life != where.life:
        del state.clients[where.client].pairs[where.server, where.life]


def retire(state: State, where: Where) -> None:
    """Leave a window of a server that is late; it may be alive and well."""
    state.spend("retire")
    if state.pair(where).retire() != where.epoch:
        raise BrokenPromise("another window was retired than the open one")
    window = state.windows[where]
    window.close = window.is_retired = True


# -- the process -------------------------------------------------------------------------------


def crash_client(state: State, c: int) -> None:
    """The process ends; what it has posted is still under way."""
    state.spend("crash_client")
    client = state.clients[c]
    client.state, client.share = CRASHED, None


def exit_client(state: State, c: int) -> None:
    """The kernel confirms the end: what has not landed by now never will."""
    client = state.clients[c]
    client.state, client.pairs, client.attempts = EXITED, {}, {}
    for where, window in state.windows.items():
        if where.instance == client.instance:
            window.request.posted = []


def restart_client(state: State, c: int) -> None:
    state.spend("restart_client")
    client = state.clients[c]
    client.state, client.instance = UP, client.instance + 10
