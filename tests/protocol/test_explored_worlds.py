"""Every interleaving of small worlds of clients and servers that run the real protocol classes.

What each world covers; ``test_exploration.py`` has one slot and reads that are not atomic.

==================  ================================================================================
failover            one client, two servers: hedges, answers of two holders, halves of a request;
                    a server crashes, is suspended, is slow and its window retired; a bad frame.
                    No request may need its deadline: each must end in the right answer
windows             one client, one server, frames that land in three pieces: requests given up and
                    late, windows retired and opened anew, crash and restart of either end, bad
                    frames of both kinds, handshakes that nobody waits for any more
neighbours          two clients, one server: a bad frame and a dead client hurt nobody else
two by two          two clients, two servers, frames that land in one piece: a hedge and a false
                    death in full; a hedge and a crash, or a suspension, to 9 steps
==================  ================================================================================

What always holds, and where it is checked: no slot is written while it may be read, nor memory
that was given back (``world.py``, where a write lands); no stale answer is accepted, none counts
twice (``finish`` in ``client_moves.py``); every request ends in its answer, or in an error at its
deadline or for its bad frame; no slot and no window is lost for ever (``check_end`` in
``world.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from typing_extensions import override

from tests.protocol.exploring import BrokenPromise, explore
from tests.protocol.modelled import Plan
from tests.protocol.world import World, opened
from torch_eaas.protocol.layout import Status
from torch_eaas.protocol.pairs import ServerEpochs
from torch_eaas.protocol.slots import ClientSlots, ServerSlots

DATA_PATH = {"ask", "land_request", "scan", "serve", "land_reply", "read", "finish"}
HANDSHAKE = {"hello", "accept", "see_handshake"}
GIVE_UP = {"deadline", "tend", "reclaim"}
HEDGE = {"hedge_time", "tend", "reclaim"}


def failover(**faults: int) -> Plan:
    """Return a plan in which a request has to be answered without waiting for its deadline."""
    return Plan(servers=2, pieces=2, faults={"deadline": 0, **faults})


def two_by_two(**faults: int) -> Plan:
    return Plan(clients=2, servers=2, pieces=1, faults={"deadline": 0, "hedge_time": 1, **faults})


@pytest.mark.parametrize(
    ("world", "steps"),
    [
        pytest.param(
            opened(failover(crash=1, restart=1)),
            HEDGE | HANDSHAKE | {"crash", "exit_server", "restart", "notice"},
            id="failover-crash and restart",
        ),
        pytest.param(
            opened(failover(suspend=1, retire=1)),
            HEDGE | HANDSHAKE | {"suspend", "retire", "close"},
            id="failover-suspension and false death",
        ),
        pytest.param(
            opened(Plan(servers=2, pieces=1, asks=2, faults={"deadline": 0, "retire": 1})),
            HEDGE | HANDSHAKE | {"retire", "close"},
            id="failover-two requests and false death",
        ),
        pytest.param(
            opened(Plan(servers=2, pieces=1, halves=True, faults={"deadline": 0, "suspend": 1})),
            HEDGE | {"suspend", "send"},
            id="failover-suspension and halves",
        ),
        pytest.param(
            opened(Plan(servers=2, pieces=2, halves=True, faults={"deadline": 0, "spoil": 1})),
            HEDGE | {"spoil"},
            id="failover-bad frame and halves",
        ),
        pytest.param(World(Plan(asks=3)), GIVE_UP | HANDSHAKE, id="windows-late answers"),
        pytest.param(World(Plan(asks=2, slots=2)), GIVE_UP | HANDSHAKE, id="windows-two slots"),
        pytest.param(
            World(Plan(asks=2, faults={"retire": 1})),
            GIVE_UP | HANDSHAKE | {"retire", "close"},
            id="windows-false death",
        ),
        pytest.param(
            World(Plan(faults={"retire": 2, "abandon": 1})),
            HANDSHAKE | {"abandon", "retire", "close"},
            id="windows-handshakes too late",
        ),
        pytest.param(
            World(Plan(asks=2, pieces=2, faults={"crash": 1, "restart": 1})),
            GIVE_UP | HANDSHAKE | {"crash", "exit_server", "restart", "notice"},
            id="windows-server restart",
        ),
        pytest.param(
            World(Plan(asks=2, pieces=2, faults={"crash_client": 1, "restart_client": 1})),
            GIVE_UP | HANDSHAKE | {"crash_client", "exit_client", "restart_client", "drop"},
            id="windows-client restart",
        ),
        pytest.param(
            World(Plan(asks=2, faults={"suspend": 1})),
            GIVE_UP | HANDSHAKE | {"suspend"},
            id="windows-suspension",
        ),
        pytest.param(
            World(Plan(asks=2, faults={"spoil": 1, "deadline": 0})),
            HANDSHAKE | {"spoil", "tend"},
            id="windows-frame of another epoch",
        ),
        pytest.param(
            World(Plan(asks=2, spoiled=Status.BAD_REQUEST, faults={"spoil": 1})),
            GIVE_UP | HANDSHAKE | {"spoil"},
            id="windows-frame that cannot be run",
        ),
        pytest.param(
            opened(Plan(clients=2, pieces=2, faults={"deadline": 1, "spoil": 1})),
            GIVE_UP | {"spoil"},
            id="neighbours-bad frame",
        ),
        pytest.param(
            opened(
                Plan(
                    clients=2,
                    pieces=1,
                    faults={"deadline": 1, "crash_client": 1, "restart_client": 1},
                )
            ),
            GIVE_UP | HANDSHAKE | {"crash_client", "exit_client", "restart_client", "drop"},
            id="neighbours-client restart",
        ),
        pytest.param(
            opened(two_by_two(retire=1)), HEDGE | {"retire", "close"}, id="two by two-false death"
        ),
    ],
)
def test_every_promise_holds_in_every_interleaving(world: World, steps: set[str]) -> None:
    found = explore(world)
    # what a world is said to cover has happened in it
    assert found.is_complete
    assert set(found.taken) >= DATA_PATH | steps, DATA_PATH | steps - set(found.taken)
    assert found.num_ends


@pytest.mark.parametrize("fault", ["crash", "suspend"])
def test_two_clients_and_two_servers_keep_every_promise_for_nine_steps(fault: str) -> None:
    found = explore(opened(two_by_two(**{fault: 1})), max_depth=9)
    assert not found.is_complete
    assert set(found.taken) >= DATA_PATH | {"hedge_time", "tend", fault}


class ReusesGivenUp(ClientSlots):
    """A book that frees a slot as soon as nobody waits for its answer."""

    @override
    def give_up(self, slot: int) -> None:
        self.release(slot)


class TakesAnyAnswer(ClientSlots):
    """A book to which every answer in a slot is the answer to its last request."""

    @override
    def answered(self, slot: int, response_word: int) -> bool:
        return response_word > 0


class TakesAnyEpoch(ServerEpochs):
    """A memory that lets an old handshake replace a newer window."""

    @override
    def accept(self, instance: int, epoch: int) -> None:
        pass


class CountsFromThisScan(ServerSlots):
    """A book that believes a request to be as fresh as the look that saw it."""

    @override
    def scan(self, words: Sequence[int], now: float) -> None:
        super().scan(self._seen, now)
        super().scan(words, now)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(
            {"word_first": True},
            r"a request's payload is written while the server may read it; after .*land request",
            id="the word before the payload",
        ),
        pytest.param(
            {"asks": 2, "client_book": ReusesGivenUp},
            r"a request's payload is written while the server may read it; after .*deadline 0, tend"
            r" 0,.* ask 0",
            id="a slot reused that was given up",
        ),
        pytest.param(
            {"drops_bad_frames": True, "faults": {"spoil": 1}},
            r"a slot of client 0 at server 0 is lost, for ever; after .*spoil .*, serve [^,]*$",
            id="a bad frame dropped instead of answered",
        ),
        pytest.param(
            {"drops_bad_frames": True, "faults": {"spoil": 1}, "spoiled": Status.BAD_REQUEST},
            r"a slot of client 0 at server 0 is lost, for ever; after .*spoil .*, serve [^,]*$",
            id="a frame that cannot be run dropped instead of answered",
        ),
        pytest.param(
            {"lease_is_death": True, "faults": {"retire": 1}},
            r"a late write lands in memory that was given back; after .*retire .*land reply [^,]*$",
            id="a server's lease taken for its death",
        ),
        pytest.param(
            {"faults": {"lease": 1}},
            r"request 0 of client 0 has not ended, for ever; after .*lease [^,]*$",
            id="a client's lease taken for its death",
        ),
        pytest.param(
            {"resets_words": True},
            r"a slot of client 0 at server 0 is lost, for ever; after .*land reply [^,]*, tend 0$",
            id="a word reset",
        ),
        pytest.param(
            {"asks": 2, "client_book": TakesAnyAnswer},
            r"the sum has \(0, 1, ''\) where it needs \(0, 2, ''\); .*ask 0, read 0 0, finish",
            id="a stale answer accepted",
        ),
        pytest.param(
            {"epochs": TakesAnyEpoch, "faults": {"abandon": 1}},
            r"request 0 of client 0 has not ended, for ever; after .*accept \S*/2, accept \S*/1$",
            id="an old handshake that replaces a newer window",
        ),
        pytest.param(
            {"answers_handshake_early": True, "faults": {"retire": 1}},
            r"a late write lands in memory that was given back; after .*accept \S*/2, land reply",
            id="a handshake answered before the last write into older windows",
        ),
        pytest.param(
            {"server_book": CountsFromThisScan, "faults": {"suspend": 1}},
            r"a server runs what nobody has waited for since long; after .*suspend 0, scan",
            id="a budget that counts from the look that saw the word",
        ),
        pytest.param(
            {"servers": 2, "pieces": 2, "sums_all_answers": True},
            r"the sum has \(0, 1, ''\), \(0, 1, ''\) where it needs \(0, 1, ''\); .*finish 0$",
            id="two answers to one request summed",
        ),
    ],
)
def test_each_broken_rule_has_a_counterexample(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenPromise, match=message):
        explore(World(Plan(**broken)))
