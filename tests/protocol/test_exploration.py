"""Every interleaving of one slot's client and server, with give-ups and late answers.

The books are the real ones. The windows are six cells. What an end writes is posted at once and
lands later, one cell at a time, while both ends go on. Each run asks a few requests; request n
carries n in header and payload, and its right answer is n.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from typing_extensions import override

from torch_eaas.protocol.slots import ClientSlots, ServerSlots

NUM_REQUESTS = 3
IN_ORDER = ("payload", "header", "word")
WORD_FIRST = ("word", "payload", "header")


def _cells() -> dict[str, int]:
    return {"payload": 0, "header": 0, "word": 0}


class BrokenPromise(Exception):
    """A step did what the protocol rules out."""


@dataclass
class World:
    """Both books, both windows, and where each end stands."""

    client: ClientSlots
    order: tuple[str, ...] = IN_ORDER
    frees_before_reading: bool = False
    server: ServerSlots = field(default_factory=lambda: ServerSlots(1, 0.0))
    request: dict[str, int] = field(default_factory=_cells)
    reply: dict[str, int] = field(default_factory=_cells)
    asked: int = 0
    client_at: str = "idle"
    unread: int = 0
    to_send: list[tuple[str, int]] = field(default_factory=list)
    frame: tuple[int, int] | None = None
    to_answer: list[tuple[str, int]] = field(default_factory=list)

    def key(self) -> str:
        """Return a text that is equal for equal states."""
        books = (vars(self.client), vars(self.server))
        return repr((books, [v for k, v in vars(self).items() if k not in ("client", "server")]))

    def check(self) -> None:
        """Check that the slot is in one place only."""
        free, given_up = self.client.num_free, self.client.num_given_up
        if (free, given_up, self.client.num_in_use) not in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
            raise BrokenPromise("the slot is lost or has two owners")


def client_steps(world: World) -> Iterator[str]:
    """Yield what the client may do next."""
    if world.to_send:
        yield "land request"
    if world.unread:
        yield "read"
    if world.client_at == "idle":
        if world.client.num_given_up:
            yield "reclaim"
        if world.asked < NUM_REQUESTS and world.client.num_free:
            yield "take"
    elif world.client_at == "waiting":
        if world.client.answered(0, world.reply["word"]):
            yield "see answer"
        # at any time, also when the answer is about to come
        yield "give up"


def server_steps(world: World) -> Iterator[str]:
    """Yield what the server may do next."""
    if world.to_answer:
        yield "land reply"
    if world.frame is not None:
        yield "read payload"
    elif world.server.num_ready:
        yield "read header"
    else:
        yield "scan"


def step(world: World, what: str) -> World:
    """Return the world after one step; BrokenPromise where it breaks one."""
    world = copy.deepcopy(world)
    STEPS[what](world)
    return world


def take(world: World) -> None:
    world.client.take()
    world.asked += 1
    word = world.client.post(0)
    sequence = word >> 8
    cells = {"payload": world.asked, "header": sequence, "word": word}
    world.to_send += [(cell, cells[cell]) for cell in world.order]
    world.client_at = "waiting"


def land_request(world: World) -> None:
    cell, value = world.to_send.pop(0)
    world.request[cell] = value


def give_up(world: World) -> None:
    world.client.give_up(0)
    world.client_at = "idle"


def reclaim(world: World) -> None:
    world.client.reclaim([world.reply["word"]])


def see_answer(world: World) -> None:
    world.unread = world.asked
    world.client_at = "reading"
    if world.frees_before_reading:
        world.client.release(0)
        world.client_at = "idle"


def read(world: World) -> None:
    answer = (world.reply["header"], world.reply["payload"])
    if answer != (world.unread, world.unread):
        raise BrokenPromise(f"the answer to {world.unread} is {answer}")
    world.unread = 0
    if world.client_at == "reading":
        world.client.release(0)
        world.client_at = "idle"


def scan(world: World) -> None:
    world.server.scan([world.request["word"]], 0.0)


def read_header(world: World) -> None:
    _, word, _ = world.server.take()
    world.frame = (word, world.request["header"])


def read_payload(world: World) -> None:
    assert world.frame is not None
    word, header = world.frame
    payload = world.request["payload"]
    # a frame whose header has another sequence than its word is refused; any other is computed
    refused = header != word >> 8
    if not refused and payload != header:
        raise BrokenPromise(f"the frame of header {header} has payload {payload}")
    cells = {
        "payload": -1 if refused else payload,
        "header": word >> 8,
        "word": ServerSlots.reply_word(word),
    }
    world.to_answer += [(cell, cells[cell]) for cell in world.order]
    world.frame = None


def land_reply(world: World) -> None:
    cell, value = world.to_answer.pop(0)
    world.reply[cell] = value


STEPS: dict[str, Callable[[World], None]] = {
    "take": take,
    "land request": land_request,
    "give up": give_up,
    "reclaim": reclaim,
    "see answer": see_answer,
    "read": read,
    "scan": scan,
    "read header": read_header,
    "read payload": read_payload,
    "land reply": land_reply,
}


def explore(start: World) -> tuple[set[str], list[World]]:
    """Try every interleaving; return the steps that were taken, and the worlds where all ended.

    Raises:
        BrokenPromise: The text ends with the steps that led there.
    """
    taken: set[str] = set()
    seen = {start.key()}
    ended: list[World] = []
    todo: deque[tuple[World, tuple[str, ...]]] = deque([(start, ())])
    while todo:
        world, path = todo.popleft()
        moved = False
        for what in [*client_steps(world), *server_steps(world)]:
            try:
                after = step(world, what)
                after.check()
            except BrokenPromise as error:
                raise BrokenPromise(f"{error}; after {', '.join([*path, what])}") from error
            taken.add(what)
            key = after.key()
            moved |= key != world.key()
            if key not in seen:
                seen.add(key)
                todo.append((after, (*path, what)))
        if not moved:
            ended.append(world)
    return taken, ended


class ReusesGivenUp(ClientSlots):
    """A book that frees a slot as soon as nobody waits for its answer."""

    @override
    def give_up(self, slot: int) -> None:
        self.release(slot)


def test_no_interleaving_accepts_a_stale_answer_or_loses_the_slot() -> None:
    taken, ended = explore(World(ClientSlots(1)))
    assert taken == set(STEPS)
    assert ended
    for world in ended:
        # all requests were asked, and whatever became of each, the slot is free again
        assert world.asked == NUM_REQUESTS
        assert world.client.num_free == 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(
            World(ClientSlots(1), order=WORD_FIRST),
            r"the frame of header \d has payload \d|the answer to \d is",
            id="the word lands before its payload",
        ),
        pytest.param(
            World(ReusesGivenUp(1)),
            r"the frame of header 1 has payload 2; after .*give up, take, land request",
            id="a slot is reused after it was given up",
        ),
        pytest.param(
            World(ClientSlots(1), frees_before_reading=True),
            r"the answer to 1 is .*; after .*see answer, take",
            id="a slot is reused before its answer was read",
        ),
    ],
)
def test_a_broken_rule_has_a_counterexample(broken: World, message: str) -> None:
    with pytest.raises(BrokenPromise, match=message):
        explore(broken)
