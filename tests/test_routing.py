"""Which server is asked for which expert."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from torch_eaas.placement import Holdings, PlacedState, Placement, ServerInfo, share
from torch_eaas.routing import LayerRoutes, mix, mix_each

LAYER, E = 3, 8


def server(name: str, holdings: Holdings, state: PlacedState = "serving") -> ServerInfo:
    return ServerInfo(
        name=name, instance=1, address=f"loopback:{name}", holdings=holdings, state=state
    )


def placed(*servers: ServerInfo) -> Placement:
    return Placement(tuple(servers), version=1)


def routes_of(placement: Placement, **options: Any) -> LayerRoutes:
    options = {
        "open_servers": {server.name for server in placement.servers},
        "suspects": (),
        "salt": 7,
        **options,
    }
    return LayerRoutes(placement, LAYER, E, **options)


def chosen(routes: LayerRoutes, ids: list[list[int]]) -> list[list[str | None]]:
    """Return the names of the servers that are asked."""
    servers_TK = routes.choose(np.array(ids, dtype=np.int64).reshape(len(ids), -1))
    names: list[list[str | None]] = []
    for row in servers_TK.tolist():
        names.append([routes.servers[i] if i >= 0 else None for i in row])
    return names


def alone(held: range) -> Holdings:
    return {LAYER: tuple(held)}


# -- one holder each ---------------------------------------------------------------------------


def test_an_experts_only_holder_is_asked_and_nobody_for_no_expert() -> None:
    placement = placed(server("a", alone(range(4))), server("b", alone(range(4, 8))))
    routes = routes_of(placement)
    assert not routes.has_replicas
    assert chosen(routes, [[0, 4], [-1, 7], [3, 3], [-1, -1]]) == [
        ["a", "b"],
        [None, "b"],
        ["a", "a"],
        [None, None],
    ]


def test_the_number_of_experts_means_no_expert_too() -> None:
    assert chosen(routes_of(placed(server("a", alone(range(E))))), [[E, 0]]) == [[None, "a"]]


def test_nobody_is_asked_for_what_nobody_holds_or_holds_in_another_layer_only() -> None:
    placement = placed(server("a", {LAYER: (0, 1), LAYER + 1: (2,)}))
    assert chosen(routes_of(placement), [[0, 2], [1, 7]]) == [["a", None], ["a", None]]


def test_only_servers_with_an_open_pair_are_asked() -> None:
    placement = placed(server("a", alone(range(E))), server("b", alone(range(E))))
    assert chosen(routes_of(placement, open_servers={"b"}), [[0, 1]]) == [["b", "b"]]
    assert chosen(routes_of(placement, open_servers=()), [[0, 1]]) == [[None, None]]


@pytest.mark.parametrize("num_tokens", [0, 1, 63])
def test_every_shape_of_ids_gets_an_answer_of_its_shape(num_tokens: int) -> None:
    routes = routes_of(placed(server("a", alone(range(E)))))
    ids_TK = np.arange(num_tokens * 3).reshape(num_tokens, 3) % E
    assert routes.choose(ids_TK).shape == (num_tokens, 3)
    assert not routes.choose(ids_TK).any()


# -- replicas ----------------------------------------------------------------------------------


def test_within_a_batch_an_expert_has_one_server() -> None:
    placement = placed(*(server(name, alone(range(E))) for name in "abc"))
    routes = routes_of(placement)
    assert routes.has_replicas
    ids = [[(t * k) % E for k in range(4)] for t in range(63)]
    seen: dict[int, set[str | None]] = {}
    for row, names in zip(ids, chosen(routes, ids), strict=True):
        for expert, name in zip(row, names, strict=True):
            seen.setdefault(expert, set()).add(name)
    assert all(len(names) == 1 for names in seen.values())


@pytest.mark.parametrize("active", [1, 2, 5, 6, 8])
def test_active_experts_are_spread_evenly_over_their_holders(active: int) -> None:
    # each holder reads the weights of its active experts from memory: that is the cost
    placement = placed(*(server(name, alone(range(E))) for name in "abc"))
    names = chosen(routes_of(placement), [list(range(active))])[0]
    loads = Counter(names)
    assert sum(loads.values()) == active
    assert max(loads.values()) == -(-active // 3)


def test_a_holder_that_must_serve_others_is_spared() -> None:
    # only a holds 0 to 3, so b takes 4 and 5, which both hold
    placement = placed(server("a", alone(range(6))), server("b", alone(range(4, 6))))
    assert chosen(routes_of(placement), [[0, 1, 2, 3, 4, 5]]) == [["a"] * 4 + ["b"] * 2]


def test_clients_spread_over_equal_replicas_and_each_is_steady() -> None:
    placement = placed(*(server(name, alone(range(E))) for name in "abcd"))
    firsts = Counter()
    for salt in range(400):
        [[name]] = chosen(routes_of(placement, salt=salt), [[5]])
        assert chosen(routes_of(placement, salt=salt), [[5]]) == [[name]]
        firsts[name] += 1
    assert set(firsts) == set("abcd")
    assert all(60 <= count <= 140 for count in firsts.values())


def test_every_shared_placement_serves_every_expert() -> None:
    for count in (1, 2, 3, 5):
        for copies in range(1, count + 1):
            held = [share([LAYER], E, i, count, copies=copies) for i in range(count)]
            placement = placed(*(server(f"s{i}", h) for i, h in enumerate(held)))
            names = chosen(routes_of(placement), [list(range(E))])[0]
            for expert, name in enumerate(names):
                assert name is not None
                assert expert in held[int(name[1:])][LAYER]


# -- whom to spare -----------------------------------------------------------------------------

BOTH = alone(range(E))


@pytest.mark.parametrize(
    ("states", "suspects", "expected"),
    [
        pytest.param({"a": "serving", "b": "serving"}, ["a"], "b", id="suspect"),
        pytest.param({"a": "draining", "b": "serving"}, [], "b", id="draining"),
        pytest.param({"a": "suspect", "b": "serving"}, [], "b", id="the monitor's suspect"),
        pytest.param({"a": "suspect", "b": "draining"}, [], "b", id="draining and suspect"),
        pytest.param({"a": "suspect", "b": "serving"}, ["b"], "a", id="own sight counts most"),
        pytest.param({"a": "draining", "b": "serving"}, ["b"], "a", id="draining beats suspect"),
        pytest.param({"a": "draining", "b": "draining"}, ["a"], "b", id="both draining"),
        pytest.param(
            {"a": "draining", "b": "serving"}, ["a", "b"], "a", id="both suspect: the better one"
        ),
    ],
)
def test_who_is_late_or_leaves_is_asked_only_while_nobody_better_holds_an_expert(
    states: dict[str, PlacedState], suspects: list[str], expected: str
) -> None:
    placement = placed(*(server(name, BOTH, state) for name, state in states.items()))
    routes = routes_of(placement, suspects=suspects)
    assert chosen(routes, [list(range(E))]) == [[expected] * E]


def test_an_experts_last_holder_is_asked_whatever_one_thinks_of_it() -> None:
    placement = placed(server("a", alone(range(4)), "draining"), server("b", alone(range(4, 8))))
    assert chosen(routes_of(placement, suspects=["a", "b"]), [[0, 7]]) == [["a", "b"]]


# -- the hash ----------------------------------------------------------------------------------


def test_mix_is_splitmix64_so_every_process_gets_the_same_numbers() -> None:
    def splitmix64(state: int) -> int:
        mask = 2**64 - 1
        z = (state + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    # the first output of splitmix64 for seed 0, as published
    assert mix(0) == splitmix64(0) == 0xE220A8397B1DCDAF
    assert mix(1, 2) == splitmix64((splitmix64(1) + 2) % 2**64)
    assert mix(2**64 - 1, 2**70) < 2**64


def test_all_experts_of_a_layer_are_hashed_at_once_as_each_is_alone() -> None:
    hashes = mix_each(2**64 - 1, LAYER, count=63).tolist()
    assert hashes == [mix(2**64 - 1, LAYER, expert) for expert in range(63)]


def test_each_experts_holders_are_all_that_are_as_good_and_begin_in_turn() -> None:
    held = {"a": alone(range(6)), "b": alone(range(E)), "c": alone(range(4)), "d": alone(range(2))}
    placement = placed(*(server(name, h) for name, h in held.items()))
    routes = routes_of(placement, suspects=["d"], salt=11)
    assert routes.holders_EH.shape == (E, 3)
    for expert, row in enumerate(routes.holders_EH.tolist()):
        holders = [i for i, name in enumerate("abc") if expert in held[name][LAYER]]
        turn = mix(11, LAYER, expert) % len(holders)
        assert row == holders[turn:] + holders[:turn] + [-1] * (3 - len(holders))
    # who is suspect is asked for want of others alone
    alone_d = routes_of(placed(server("d", alone(range(1)))), suspects=["d"])
    assert alone_d.holders_EH.tolist() == [[0]] + [[-1]] * (E - 1)
