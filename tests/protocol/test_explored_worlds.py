"""Every interleaving of small worlds of clients and servers that run the real protocol classes.

What each world covers; ``test_exploration.py`` has one slot and reads that are not atomic, and
``test_broken_rules.py`` breaks one rule after the other and expects a counterexample.

==================  ================================================================================
failover            one client, two servers: hedges, answers of two holders, halves of a request;
                    a server crashes, hangs, is suspended, or is slow and its window retired; a
                    bad frame.
                    No request may need its deadline: each must end in the right answer
windows             one client, one server, frames that land in three pieces: requests given up and
                    late, windows retired and opened anew, crash and restart of either end, bad
                    frames of both kinds, handshakes that nobody waits for any more
neighbours          two clients, one server: a bad frame and a dead client hurt nobody else
two by two          two clients, two servers, frames that land in one piece: a hedge and a false
                    death, or a crash, in full; a hedge and a suspension to 9 steps
==================  ================================================================================

What always holds, and where it is checked: no slot is written while it may be read, nor memory
that was given back (``world.py``, where a write lands); no stale answer is accepted, none counts
twice (``finish`` in ``client_moves.py``); every request ends in its answer, or in an error at its
deadline or for its bad frame; no slot and no window is lost for ever (``check_end`` in
``world.py``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.protocol.exploring import explore
from tests.protocol.modelled import Plan
from tests.protocol.world import World, opened
from torch_eaas.protocol.layout import Status

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
            opened(failover(hang=1, retire=1)),
            HEDGE | {"hang", "retire"},
            id="failover-a server that hangs for ever",
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
        pytest.param(
            opened(replace(two_by_two(crash=1), reduced=True)),
            HEDGE | {"crash", "exit_server", "notice"},
            id="two by two-crash",
            marks=pytest.mark.timeout(300),
        ),
    ],
)
def test_every_promise_holds_in_every_interleaving(world: World, steps: set[str]) -> None:
    found = explore(world)
    # what a world is said to cover has happened in it
    assert found.is_complete
    assert set(found.taken) >= DATA_PATH | steps, DATA_PATH | steps - set(found.taken)
    assert found.num_ends


def test_two_clients_and_two_servers_of_which_one_is_suspended_for_nine_steps() -> None:
    found = explore(opened(two_by_two(suspend=1)), max_depth=9)
    assert not found.is_complete
    assert set(found.taken) >= DATA_PATH | {"hedge_time", "tend", "suspend"}
