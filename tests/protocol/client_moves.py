"""What a modelled client may do with a request: ask, read, fail over, as the real one.

It stands for ``client_engine.py``; what that decides by a clock may happen here at any time.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.exploring import BrokenPromise, Step
from tests.protocol.modelled import (
    CRASHED,
    DEADLINE,
    HEDGE_AT,
    SENT_AT,
    UP,
    Sent,
    State,
)
from tests.protocol.pair_moves import (
    crash_client,
    exit_client,
    has_word,
    pair_steps,
    restart_client,
    window_of,
)
from torch_eaas.protocol.layout import Status
from torch_eaas.protocol.requests import Fate, Need


def client_steps(state: State, c: int) -> Iterator[Step]:
    """Yield what a client may do next."""
    client = state.clients[c]
    if client.state == UP:
        yield from pair_steps(state, c)
        if client.share is not None:
            yield from _request_steps(state, c)
        elif client.asked < state.plan.asks and (_open(state, c) or not _any_server(state)):
            yield from state.step(ask, c)
        yield from state.step(crash_client, c)
    elif client.state == CRASHED:
        yield from state.step(exit_client, c)
    else:
        yield from state.step(restart_client, c)


def _request_steps(state: State, c: int) -> Iterator[Step]:
    client = state.clients[c]
    assert client.share is not None
    if client.share.winner is not None:
        yield from state.step(finish, c)
    # losers too, until the sum is made: the real client reads all that has come in one pass
    for number, request in enumerate(client.sent()):
        if request.fate is Fate.WAITING:
            if request.where is None:
                yield from state.step(send, c, number)
            elif has_word(state, request):
                yield from state.step(read, c, number)
    if client.share.winner is not None:
        return
    need = client.share.need(client.now)
    if need in (Need.HEDGE, Need.EXPIRE) or (need is Need.RESEND and _open(state, c)):
        yield from state.step(tend, c)
    if state.plan.servers > 1 and client.now < HEDGE_AT:
        yield from state.step(hedge_time, c)
    if client.now < DEADLINE:
        yield from state.step(deadline, c)


def _any_server(state: State) -> bool:
    return any(server.state == UP for server in state.servers)


def _open(state: State, c: int) -> list[int]:
    """Return the servers that may be asked, the best first."""
    servers = [s for s in range(state.plan.servers) if state.open_window(c, s)]
    tried = [request.server for request in state.clients[c].sent()]

    def badness(s: int) -> tuple[bool, bool]:
        where = state.open_window(c, s)
        assert where is not None
        return str(s) in tried, state.pair(where).suspect

    return sorted(servers, key=badness)


# -- asking ------------------------------------------------------------------------------------


def ask(state: State, c: int) -> None:
    client = state.clients[c]
    client.asked += 1
    client.now, client.was_spoiled = SENT_AT, False
    client.share = state.plan.original(SENT_AT, HEDGE_AT - SENT_AT, DEADLINE - SENT_AT)
    if servers := _open(state, c):
        _post(state, c, [Sent(servers[0])])


def send(state: State, c: int, number: int) -> None:
    """Send what found no free slot before; answers that have come make room."""
    for request in state.clients[c].sent():
        if request.fate is Fate.ANSWERED and request.where is not None:
            request.kept = _payload(state, request)
            _free(state, request)
    _send(state, c, state.clients[c].sent()[number])


def _free(state: State, request: Sent) -> None:
    book = window_of(state, request).client
    assert book is not None
    book.release(request.slot)
    request.where = None


def _payload(state: State, request: Sent) -> object:
    """Return an answer's rows: a copy, or what lies in the slot now."""
    if request.where is None:
        return request.kept
    return window_of(state, request).reply.cells[request.slot].payload


def _post(state: State, c: int, requests: list[Sent]) -> None:
    client = state.clients[c]
    assert client.share is not None
    client.share.add(requests)
    for request in requests:
        _send(state, c, request)


def _send(state: State, c: int, request: Sent) -> None:
    where = state.open_window(c, int(request.server))
    if where is None:
        request.fate = Fate.LOST
        return
    window = state.windows[where]
    assert window.client is not None
    slot = window.client.take()
    if slot is None:
        return
    request.where, request.slot = where, slot
    word = window.client.post(slot)
    payload = (c, state.clients[c].asked, request.half)
    header = (where.instance, where.epoch, word >> 8, payload, "")
    window.request.post(state.plan, slot, payload, header, word)


# -- reading -----------------------------------------------------------------------------------


def read(state: State, c: int, number: int) -> None:
    """Read an answer's header; its rows are read when all is there."""
    client = state.clients[c]
    request = client.sent()[number]
    window, where = window_of(state, request), request.where
    assert where is not None
    assert window.client is not None
    if state.is_open(where):
        state.pair(where).suspect = False
    instance, epoch, _, status = window.reply.cells[request.slot].header or (0, 0, 0, Status.OK)
    if (instance, epoch) == (where.instance, where.epoch) and status is Status.OK:
        request.fate = Fate.ANSWERED
    else:
        request.fate = Fate.LOST
        _free(state, request)
        if not status.may_retry and status is not Status.OK:
            if not client.was_spoiled:
                raise BrokenPromise(f"client {c} sent a good frame and was told {status.name}")
            _end(state, c)
            return
    assert client.share is not None
    client.share.settle()


def finish(state: State, c: int) -> None:
    """Read the winner's rows, add them up, and let go of every slot."""
    client = state.clients[c]
    assert client.share is not None
    winner = client.share.winner or ()
    summed = client.sent() if state.plan.sums_all_answers else winner
    rows = sorted(
        str(_payload(state, request))
        for request in summed
        if isinstance(request, Sent) and request.fate is Fate.ANSWERED
    )
    halves = [""] if len(winner) == 1 else ["left", "right"]
    wanted = [str((c, client.asked, half)) for half in halves]
    if rows != wanted:
        raise BrokenPromise(f"the sum has {', '.join(rows)} where it needs {', '.join(wanted)}")
    _end(state, c)


def _end(state: State, c: int) -> None:
    """Free or give up every slot of the request under way."""
    client = state.clients[c]
    for request in client.sent():
        if request.where is None:
            continue
        if request.fate is not Fate.WAITING or not state.is_open(request.where):
            _free(state, request)
            continue
        window = window_of(state, request)
        assert window.client is not None
        window.client.give_up(request.slot)
        if state.plan.resets_words:
            memory, slot = window.reply, request.slot
            memory.cells[slot] = memory.cells[slot]._replace(word=0)
    client.share, client.now, client.was_spoiled = None, SENT_AT, False


# -- failing over ------------------------------------------------------------------------------


def hedge_time(state: State, c: int) -> None:
    state.spend("hedge_time")
    state.clients[c].now = HEDGE_AT


def deadline(state: State, c: int) -> None:
    state.spend("deadline")
    state.clients[c].now = DEADLINE


def tend(state: State, c: int) -> None:
    """Do what the original needs."""
    client = state.clients[c]
    share = client.share
    assert share is not None
    need, servers = share.need(client.now), _open(state, c)
    if need is Need.EXPIRE:
        _suspect(state, c)
        _end(state, c)
    elif need is Need.HEDGE:
        share.hedged(share.deadline)
        if servers and str(servers[0]) not in share.tried:
            _suspect(state, c)
            _post(state, c, [Sent(servers[0])])
    elif servers:
        share.hedge_at = client.now + HEDGE_AT - SENT_AT
        if state.plan.halves and len(servers) > 1:
            _post(state, c, [Sent(servers[0], "left"), Sent(servers[1], "right")])
        else:
            _post(state, c, [Sent(servers[0])])


def _suspect(state: State, c: int) -> None:
    for request in state.clients[c].sent():
        waits = request.fate is Fate.WAITING and request.where is not None
        if waits and request.where is not None and state.is_open(request.where):
            state.pair(request.where).suspect = True
