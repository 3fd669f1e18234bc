"""Taking alone a step whose turn does not matter changes neither the ends nor what is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.protocol.exploring import BrokenPromise, Numbers, explore
from tests.protocol.modelled import Plan
from tests.protocol.test_broken_rules import NeverHedges, TakesAnyAnswer
from tests.protocol.world import opened


@pytest.mark.parametrize(
    ("plan", "at_most"),
    [
        pytest.param(Plan(asks=3), 0.8, id="late answers"),
        pytest.param(Plan(asks=2, faults={"suspend": 1}), 0.95, id="suspension"),
        pytest.param(
            Plan(servers=2, faults={"deadline": 0, "crash": 1, "restart": 1}), 1.0, id="restart"
        ),
        pytest.param(
            Plan(servers=2, halves=True, faults={"deadline": 0, "suspend": 1}), 0.9, id="halves"
        ),
        pytest.param(Plan(clients=2, faults={"spoil": 1, "deadline": 1}), 0.9, id="neighbours"),
        pytest.param(
            Plan(clients=2, servers=2, faults={"deadline": 0, "hedge_time": 1}),
            0.5,
            id="two by two",
        ),
    ],
)
def test_the_ends_are_the_same_and_the_states_fewer(plan: Plan, at_most: float) -> None:
    numbers = Numbers()
    coarse = replace(plan, pieces=1)
    full = explore(opened(coarse), numbers=numbers)
    reduced = explore(opened(replace(coarse, reduced=True)), numbers=numbers)
    assert reduced.ends == full.ends
    assert set(reduced.taken) == set(full.taken)
    assert reduced.num_states <= at_most * full.num_states


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resets_words": True}, "a slot of client 0 at server 0 is lost, for ever"),
        (
            {"asks": 2, "client_book": TakesAnyAnswer},
            "an answer's payload is written while the client may read it",
        ),
        ({"servers": 2, "sums_all_answers": True}, r"the sum has .* where it needs"),
        (
            {"servers": 2, "faults": {"deadline": 0, "hang": 1}, "original": NeverHedges},
            "request 1 of client 0 has not ended, for ever",
        ),
        ({"drops_bad_frames": True, "faults": {"spoil": 1}}, "a slot of client 0 at server 0 is"),
        ({"lease_is_death": True, "faults": {"retire": 1}}, "memory that was given back"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_a_broken_rule_is_found_all_the_same(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenPromise, match=message):
        explore(opened(Plan(pieces=1, reduced=True, **change)))


@pytest.mark.parametrize("change", [{"pieces": 2}, {"slots": 2}], ids=str)
def test_nothing_is_left_out_where_the_order_matters(change: dict[str, int]) -> None:
    plan = Plan(**{"pieces": 1, **change})
    full, reduced = (explore(opened(replace(plan, reduced=on))) for on in (False, True))
    assert reduced.num_states == full.num_states
