"""The modelled world: clients, servers, and the windows between them; the books are the real ones.

A *write* is posted at once and lands later, in its turn within its slot, while everybody goes on,
also when its sender has crashed meanwhile. Request n of client c carries (c, n) in its payload, and
so must its answer. ``client_moves.py`` and ``server_moves.py`` say what an end may do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.protocol.exploring import Step
from torch_eaas.protocol.layout import Status
from torch_eaas.protocol.pairs import ClientPair, ServerEpochs
from torch_eaas.protocol.requests import Original, Request
from torch_eaas.protocol.slots import ClientSlots, ServerSlots

PAYLOAD, HEADER, WORD = "payload", "header", "word"
UP, HUNG, CRASHED, EXITED = "up", "hung", "crashed", "exited"
SENT_AT, HEDGE_AT, DEADLINE = 0, 1, 2
FAULTS: tuple[str, ...] = ("hang", "crash", "restart", "suspend", "crash_client", "restart_client")
FAULTS += ("retire", "abandon", "spoil", "lease")
BUDGET = 1
LONG = 10
"""A suspended server's clock goes on by this, which is more than any request's budget."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How large a world is, what may go wrong in it, and which rule is broken."""

    clients: int = 1
    servers: int = 1
    asks: int = 1
    """Requests of each client, one after the other."""
    slots: int = 1
    faults: dict[str, int] = field(default_factory=dict, hash=False)
    """How often each fault may happen. With ``deadline`` here a request may not need its own."""
    pieces: int = 3
    """How a frame lands: 3 is payload and header in any order, then the word; 2 is payload with
    header, then the word; 1 is all at once."""
    spoiled: Status = Status.STALE
    """What a bad frame is: of another epoch, or one that no server can run."""
    halves: bool = False
    """Whether what is asked again is asked of two servers, in two requests."""
    reduced: bool = field(default=False, compare=False)
    """Whether a step whose turn does not matter is taken alone; see ``World.only_step``."""

    client_book: type[ClientSlots] = ClientSlots
    server_book: type[ServerSlots] = ServerSlots
    epochs: type[ServerEpochs] = ServerEpochs
    original: type[Original] = Original
    word_first: bool = False
    drops_bad_frames: bool = False
    lease_is_death: bool = False
    resets_words: bool = False
    answers_handshake_early: bool = False
    sums_all_answers: bool = False


class Where(NamedTuple):
    """Names a pair's window: which life of which client, of which server, and the epoch."""

    client: int
    instance: int
    server: int
    life: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.client}.{self.instance}-{self.server}.{self.life}/{self.epoch}"


class Cells(NamedTuple):
    """What has landed in a slot."""

    payload: Any = None
    header: Any = None
    word: int = 0


class Write(NamedTuple):
    """What was posted and has not landed; of one slot those of a lower rank land first."""

    rank: int
    slot: int
    cells: tuple[tuple[str, Any], ...]


class Memory:
    """One end's window: the cells of its slots, and the writes that are under way to it."""

    def __init__(self, num_slots: int) -> None:
        self.cells = [Cells()] * num_slots
        self.posted: list[Write] = []
        self.is_mapped = True

    @property
    def words(self) -> list[int]:
        """The words at the window's head."""
        return [cells.word for cells in self.cells]

    def post(self, plan: Plan, slot: int, payload: Any, header: Any, word: int) -> None:
        """Post a frame; its word lands last."""
        body: list[tuple[tuple[str, Any], ...]] = [((PAYLOAD, payload),), ((HEADER, header),)]
        last = (WORD, word)
        if plan.pieces < 3:
            body = [(*body[0], *body[1])]
        if plan.pieces < 2:
            body = [(*body[0], last)]
        self.posted += [Write(1, slot, cells) for cells in body]
        if plan.pieces > 1:
            self.posted.append(Write(0 if plan.word_first else 2, slot, (last,)))

    def may_land(self) -> Iterator[int]:
        """Yield the writes that may land next."""
        for number, write in enumerate(self.posted):
            if all(other.slot != write.slot or other.rank >= write.rank for other in self.posted):
                yield number


class Window:
    """Both ends' memory of one pair in one epoch, and both ends' books."""

    def __init__(self, num_slots: int) -> None:
        self.request, self.reply = Memory(num_slots), Memory(num_slots)
        self.client: ClientSlots | None = None
        self.server: ServerSlots | None = None
        self.hello = True
        """Whether the handshake is under way to the server."""
        self.close = False
        """Whether the client's word that it has retired this is under way."""
        self.is_refused = self.is_retired = False
        self.is_revoked = False
        """Whether the server has promised to write here no more."""
        self.saw = [0] * num_slots
        """The words that the server last looked at, and when it did."""
        self.saw_at = 0
        self.landed_at = [0] * num_slots
        """The server's clock when it landed."""


class Sent(Request):
    """A request, whole or half, and where it lies; ``where`` is None while it has no slot."""

    __slots__ = ("half", "kept", "slot", "where")

    def __init__(self, server: int, half: str = "") -> None:
        super().__init__(str(server))
        self.half = half
        self.where: Where | None = None
        self.slot = 0
        self.kept: Any = None
        """The answer, once it was copied out of its slot."""


class ClientEnd:
    """One client: its pairs, and the one request that it has under way."""

    def __init__(self, number: int) -> None:
        self.instance = number
        self.state = UP
        self.pairs: dict[tuple[int, int], ClientPair] = {}
        self.attempts: dict[int, Where] = {}
        self.share: Original | None = None
        self.asked = 0
        self.now = SENT_AT
        self.was_spoiled = False

    def sent(self) -> list[Sent]:
        """Return every request of the original under way."""
        return [r for r in self.share.requests() if isinstance(r, Sent)] if self.share else []


class ServerEnd:
    """One server: which epochs it saw, and its clock."""

    def __init__(self, plan: Plan) -> None:
        self.life = 1
        self.state = UP
        self.clock = 0
        self.epochs = plan.epochs()


class State:
    """Everything there is."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.left = dict.fromkeys(FAULTS, 0) | plan.faults
        self.clients = [ClientEnd(10 + c) for c in range(plan.clients)]
        self.servers = [ServerEnd(plan) for _ in range(plan.servers)]
        self.windows: dict[Where, Window] = {}

    def step(self, act: Any, *args: Any) -> Iterator[Step]:
        """Yield a step, unless it is a fault and there were enough of its kind."""
        name = act.__name__
        if self.left.get(name, 1):
            yield Step(act, args, name in self.left)

    def spend(self, fault: str) -> None:
        """Note that a fault has happened."""
        if fault in self.left:
            self.left[fault] -= 1

    def server_lives(self, where: Where) -> bool:
        """Return whether the server's life that a window is of has not certainly ended."""
        server = self.servers[where.server]
        return server.life == where.life and server.state != EXITED

    def client_lives(self, where: Where) -> bool:
        """Return whether the client's life that a window is of has not certainly ended."""
        client = self.clients[where.client]
        return client.instance == where.instance and client.state != EXITED

    def open_window(self, c: int, s: int) -> Where | None:
        """Return the window that a client uses for a server."""
        client = self.clients[c]
        for (server, life), pair in client.pairs.items():
            if server == s and pair.is_open:
                return Where(c, client.instance, s, life, pair.open_epoch)
        return None

    def pair(self, where: Where) -> ClientPair:
        """Return what a window's client remembers of its server."""
        return self.clients[where.client].pairs[where.server, where.life]

    def is_open(self, where: Where) -> bool:
        """Return whether the client uses a window."""
        return self.open_window(where.client, where.server) == where

    def held(self, where: Where) -> list[int]:
        """Return the slots of a window that requests under way have."""
        if not self.client_lives(where):
            return []
        client = self.clients[where.client]
        return [request.slot for request in client.sent() if request.where == where]
