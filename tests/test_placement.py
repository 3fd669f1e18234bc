from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from torch_eaas.errors import ConfigError
from torch_eaas.placement import (
    Holdings,
    PlacedState,
    Placement,
    ServerInfo,
    holdings_from,
    share,
)

ENTRY: dict[str, Any] = {
    "name": "s1",
    "instance": "00000000000000a1",
    "address": "unix:@s1",
    "holdings": {"1": [0, 2]},
    "state": "serving",
}


def server(name: str, holdings: Holdings, **more: Any) -> ServerInfo:
    return ServerInfo(name=name, instance=1, address=f"unix:@{name}", holdings=holdings, **more)


@pytest.mark.parametrize(
    ("pairs", "holdings"),
    [
        ([], {}),
        ([(2, 5)], {2: (5,)}),
        ([(2, 5), (1, 3), (1, 0), (1, 3)], {1: (0, 3), 2: (5,)}),
    ],
    ids=["none", "one", "unordered and twice"],
)
def test_holdings_are_sorted_and_hold_each_pair_once(
    pairs: list[tuple[int, int]], holdings: Holdings
) -> None:
    result = holdings_from(iter(pairs))
    assert result == holdings
    assert list(result) == sorted(result)


def test_a_share_is_that_of_the_docstring() -> None:
    assert share([4, 6], 4, 0, 3, copies=2) == {4: (0, 2, 3), 6: (0, 2, 3)}


@pytest.mark.parametrize("num_experts", [0, 1, 7, 63, 256])
@pytest.mark.parametrize(("count", "copies"), [(1, 1), (3, 1), (3, 2), (3, 3), (8, 2), (63, 5)])
def test_shares_give_each_expert_its_copies_on_different_servers(
    num_experts: int, count: int, copies: int
) -> None:
    shares = [share([1], num_experts, i, count, copies=copies)[1] for i in range(count)]
    assert all(list(experts) == sorted(set(experts)) for experts in shares)
    holders = Counter(expert for experts in shares for expert in experts)
    assert holders == Counter(dict.fromkeys(range(num_experts), copies))
    sizes = [len(experts) for experts in shares]
    # going round, a server is at most one expert a copy above another
    assert max(sizes) - min(sizes) <= copies
    assert sum(sizes) == num_experts * copies


@pytest.mark.parametrize(("index", "count"), [(0, 0), (3, 3), (-1, 3), (0, -1)])
def test_a_share_outside_the_servers_is_refused(index: int, count: int) -> None:
    with pytest.raises(ConfigError, match=f"0 <= index < count, got {index}/{count}"):
        share([1], 4, index, count)


@pytest.mark.parametrize("copies", [0, 4, -1])
def test_more_copies_than_servers_are_refused(copies: int) -> None:
    with pytest.raises(ConfigError, match=rf"number of servers \(3\), got {copies}"):
        share([1], 4, 0, 3, copies=copies)


def test_holders_come_in_the_order_of_servers_and_draining_ones_last() -> None:
    placement = Placement(
        (
            server("a", {1: (0, 1)}, state="draining"),
            server("b", {1: (0,)}),
            server("c", {1: (0,), 2: (1,)}),
            server("d", {}),
        )
    )
    assert placement.holders(1, 0) == (1, 2, 0)
    assert placement.holders(1, 1) == (0,)
    assert placement.holders(2, 1) == (2,)
    assert placement.holders(2, 0) == placement.holders(9, 0) == ()


@pytest.mark.parametrize(
    ("held", "missing"),
    [
        ([], [(1, 0), (1, 1), (2, 0), (2, 1)]),
        ([{1: (0, 1)}], [(2, 0), (2, 1)]),
        ([{1: (0,)}, {1: (0,), 2: (1,)}], [(1, 1), (2, 0)]),
        ([{1: (0, 1)}, {2: (0, 1)}], []),
    ],
    ids=["nobody", "one layer", "holes", "all"],
)
def test_missing_experts_are_those_without_a_holder(
    held: list[Holdings], missing: list[tuple[int, int]]
) -> None:
    placement = Placement(tuple(server(f"s{i}", h) for i, h in enumerate(held)))
    assert placement.missing((1, 2), 2) == missing


@pytest.mark.parametrize(
    ("states", "missing", "uncovered"),
    [
        (["serving"], False, False),
        (["draining"], False, True),
        (["suspect"], True, True),
        (["suspect", "draining"], False, True),
        (["suspect", "draining", "serving"], False, False),
    ],
    ids=str,
)
def test_who_drains_holds_for_now_and_who_is_suspect_does_not(
    states: list[PlacedState], missing: bool, uncovered: bool
) -> None:
    servers = (server(f"s{i}", {1: (0,)}, state=state) for i, state in enumerate(states))
    placement = Placement(tuple(servers))
    assert placement.missing([1], 1) == [(1, 0)] * missing
    assert placement.missing([1], 1, worst="serving") == [(1, 0)] * uncovered
    assert placement.holders(1, 0) == tuple(range(len(states)))[::-1]


def test_a_term_weighs_more_than_any_version() -> None:
    orders = [
        Placement(version=v, term=t).order for t, v in [(0, 0), (1, 1), (1, 9), (2, 0), (10, 1)]
    ]
    assert orders == sorted(set(orders))


@pytest.mark.parametrize("names", [["b", "a"], ["a", "a"]], ids=["unordered", "twice"])
def test_servers_must_be_ordered_and_unique(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="servers must be ordered by name and unique, got"):
        Placement(tuple(server(name, {}) for name in names))


def test_a_placement_survives_json() -> None:
    last = ServerInfo(name="s2", instance=(1 << 64) - 1, address="x", holdings={}, state="draining")
    placement = Placement((server("s1", {1: (0, 2), 60: (255,)}), last), version=7, term=3)
    data = json.loads(json.dumps(placement.to_json()))
    assert data["servers"][1]["instance"] == "f" * 16
    assert Placement.from_json(data) == placement


def test_servers_in_json_may_come_in_any_order_and_holdings_too() -> None:
    entries = [{**ENTRY, "name": "b", "holdings": {"2": [5, 1, 5]}}, {**ENTRY, "name": "a"}]
    placement = Placement.from_json({"servers": entries, "version": 1, "term": 1, "more": True})
    assert [s.name for s in placement.servers] == ["a", "b"]
    assert placement.servers[1].holdings == {2: (1, 5)}


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        "text",
        {"servers": [], "version": 1},
        {"servers": None, "version": 1, "term": 1},
        {"servers": [], "version": "x", "term": 1},
        {"servers": [], "version": None, "term": 1},
        {"servers": [], "version": float("inf"), "term": 1},
    ],
    ids=str,
)
def test_what_is_no_placement_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="not a placement"):
        Placement.from_json(data)


@pytest.mark.parametrize(
    "change",
    [
        {"instance": 161},
        {"instance": "xyz"},
        {"instance": "-1"},
        {"instance": "f" * 17},
        {"holdings": [1]},
        {"holdings": {"x": [1]}},
        {"holdings": {"1": 5}},
        {"holdings": {"1": ["x"]}},
        {"holdings": {"1": [-1]}},
        {"holdings": {"-1": [1]}},
        {"holdings": {"1": [float("inf")]}},
        {"state": "asleep"},
        {"state": None},
    ],
    ids=str,
)
def test_what_is_no_server_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not a server description"):
        Placement.from_json({"servers": [{**ENTRY, **change}], "version": 1, "term": 1})


@pytest.mark.parametrize("field", ["name", "instance", "address", "holdings"])
def test_a_server_without_a_field_is_refused_by_its_name(field: str) -> None:
    entry = {key: value for key, value in ENTRY.items() if key != field}
    with pytest.raises(ConfigError, match=f"not a server description: KeyError.'{field}'"):
        ServerInfo.from_json(entry)


@pytest.mark.parametrize("entry", [None, [], "text", 5], ids=str)
def test_what_is_no_object_is_no_server(entry: Any) -> None:
    with pytest.raises(ConfigError, match="not a server description"):
        ServerInfo.from_json(entry)


def test_two_servers_of_one_name_in_json_are_refused() -> None:
    with pytest.raises(ConfigError, match="ordered by name and unique"):
        Placement.from_json({"servers": [ENTRY, ENTRY], "version": 1, "term": 1})


def test_a_server_that_names_no_state_serves() -> None:
    entry = {key: value for key, value in ENTRY.items() if key != "state"}
    assert ServerInfo.from_json(entry).state == "serving"
