"""When which process fails: a schedule is JSON, a list of phases.

A phase is a list of whole numbers, one for each process: the servers by number, then the clients,
then the monitor. Negative: this process faults in this phase; else it lives on::

    [[-1,  0,  0,  0,   0, 0,   0],     server 0 is killed and started again
     [ 0,  0, -2,  0,   0, 0,   0],     server 2 is stopped, and goes on after a while
     [ 0, -1,  0, -1,   0, 0,   0],     servers 1 and 3: no expert has both as holders
     [ 0,  0,  0,  0,   0, -1,  0],     client 1 is killed
     [ 0,  0,  0,  0,   0, 0,  -2]]     the monitor is stopped for longer than a lease

-1 is SIGKILL, and a new process at once, at nice 19. -2 is SIGSTOP, and SIGCONT after a while. A
phase begins when all processes are well. Expert e is held by servers e and e + 1, round the ring,
so two neighbours must not fault in one phase.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_eaas.errors import ConfigError

KILL, STOP = -1, -2
STOPPED_OF_TEN = 3
"""Of ten faults of servers so many are stops."""

OTHERS_EACH = 10
"""One phase of so many is a client's, another one the monitor's: kills and stops in turn."""

Phase = Sequence[int]


def random_schedule(
    seed: int, num_phases: int, num_servers: int, num_clients: int
) -> list[list[int]]:
    """Return a schedule of one fault a phase."""
    rng = random.Random(seed)
    phases = []
    for number in range(num_phases):
        phase = [0] * (num_servers + num_clients + 1)
        turn = (KILL, STOP)[number // OTHERS_EACH % 2]
        if number % OTHERS_EACH == OTHERS_EACH // 2:
            phase[-1] = turn
        elif number % OTHERS_EACH == OTHERS_EACH - 1:
            client = number // (2 * OTHERS_EACH) % num_clients
            phase[num_servers + client] = turn
        else:
            phase[rng.randrange(num_servers)] = STOP if rng.random() * 10 < STOPPED_OF_TEN else KILL
        phases.append(phase)
    return phases


def check_schedule(phases: Any, num_servers: int, num_clients: int) -> list[list[int]]:
    """Return a schedule that is one.

    Raises:
        ConfigError: It is not of the form that the module describes; names the phase.
    """
    length = num_servers + num_clients + 1
    if not isinstance(phases, list) or not phases:
        raise ConfigError(f"a schedule is a list of phases, got {phases!r:.80}")
    for number, phase in enumerate(phases):
        if (
            not isinstance(phase, list)
            or len(phase) != length
            or not all(type(value) is int and value >= STOP for value in phase)
        ):
            raise ConfigError(
                f"phase {number}: wanted {length} whole numbers of at least {STOP} "
                f"({num_servers} servers, {num_clients} clients, the monitor), got {phase!r:.80}"
            )
        down = {server for server in range(num_servers) if phase[server] < 0}
        for server in down:
            if num_servers > 1 and (server + 1) % num_servers in down:
                raise ConfigError(
                    f"phase {number}: servers {server} and {(server + 1) % num_servers} hold the "
                    f"same experts; let them fault in different phases"
                )
    return phases


def for_clients(
    phases: Sequence[Sequence[int]], num_servers: int, num_clients: int
) -> list[list[int]]:
    """Return a schedule for fewer clients; a sole client is stopped, but never killed.

    Raises:
        ConfigError: No phase is left that is timed: one in which no client faults.
    """
    first, last = num_servers, num_servers + num_clients
    fitted = [[*phase[:last], phase[-1]] for phase in phases]
    if num_clients == 1:
        for phase in fitted:
            phase[first] = 0 if phase[first] == KILL else phase[first]
    left = [phase for phase in fitted if min(phase) < 0]
    if all(any(phase[first:last]) for phase in left):
        raise ConfigError(
            f"a schedule needs a phase in which a server or the monitor faults and no client does, "
            f"got {phases!r:.80}"
        )
    return left


def load_schedule(path: Path, num_servers: int, num_clients: int) -> list[list[int]]:
    """Return the schedule in a file; ConfigError if it is none."""
    try:
        phases = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a schedule from {path}: {error}") from error
    return check_schedule(phases, num_servers, num_clients)
