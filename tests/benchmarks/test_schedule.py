"""Schedules: their form, what they must not do, and the random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.schedule import (
    KILL,
    STOP,
    check_schedule,
    for_clients,
    load_schedule,
    random_schedule,
)
from torch_eaas.errors import ConfigError
from torch_eaas.placement import share


def test_random_schedules_depend_on_the_seed_and_hit_every_process() -> None:
    phases = random_schedule(5, 120, 4, 2)
    assert phases == random_schedule(5, 120, 4, 2)
    assert phases != random_schedule(6, 120, 4, 2)
    assert check_schedule(phases, 4, 2) == phases
    assert all(sum(value < 0 for value in phase) == 1 for phase in phases)
    hit = [{phase[process] for phase in phases} - {0} for process in range(7)]
    assert hit == [{KILL, STOP}] * 7


def test_neighbours_on_the_ring_are_the_holders_of_one_expert() -> None:
    held = [set(share([0], 16, index, 4, copies=2)[0]) for index in range(4)]
    for expert in range(16):
        holders = {index for index in range(4) if expert in held[index]}
        assert holders == {expert % 4, (expert + 1) % 4}


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], r"a schedule is a list of phases, got \[\]"),
        ({"a": 1}, "a schedule is a list of phases"),
        ([[0, 0, 0]], r"phase 0: wanted 7 whole numbers of at least -2 .*got \[0, 0, 0\]"),
        ([[0] * 7, [0, 0, 0, 0, 0, 0, -3]], "phase 1: wanted 7 whole numbers"),
        ([[0, 0, 0, 0, 0, 0, True]], "phase 0: wanted 7 whole numbers"),
        ([[0, -1, -2, 0, 0, 0, 0]], "phase 0: servers 1 and 2 hold the same experts"),
        ([[-1, 0, 0, -1, 0, 0, 0]], "phase 0: servers 3 and 0 hold the same experts"),
    ],
    ids=str,
)
def test_what_is_no_schedule_is_refused(phases: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(json.dumps(phases))
    with pytest.raises(ConfigError, match=message):
        load_schedule(file, 4, 2)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("[[")
    for name in ("s.json", "missing.json"):
        with pytest.raises(ConfigError, match=f"cannot read a schedule from .*{name}"):
            load_schedule(tmp_path / name, 4, 2)


def test_two_servers_that_share_no_expert_may_fault_together() -> None:
    assert check_schedule([[-1, 0, -2, 0, 0, 0, 0]], 4, 2) == [[-1, 0, -2, 0, 0, 0, 0]]


def test_a_sole_client_is_stopped_but_lives() -> None:
    phases = [[-1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, -1, 0, 0], [0, -1, 0, 0, -2, -1, 0]]
    assert for_clients(phases, 4, 1) == [[-1, 0, 0, 0, 0, 0], [0, -1, 0, 0, -2, 0]]
    assert for_clients(phases, 4, 2) == phases
    with pytest.raises(ConfigError, match="a phase in which a server or the monitor faults"):
        for_clients([[0, 0, 0, 0, -1, 0, 0], [0, 0, 0, 0, 0, -2, 0], [0] * 7], 4, 1)
    with pytest.raises(ConfigError, match="faults and no client does"):
        for_clients([[-1, 0, 0, 0, -2, 0, 0], [0] * 7], 4, 2)
