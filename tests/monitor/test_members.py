from __future__ import annotations

import random

import pytest

from tests.monitor.planned import ALL, LEASE, MONITOR, Cluster, client, server
from torch_eaas.errors import ConfigError
from torch_eaas.monitor.announcement import Known, ModelInfo
from torch_eaas.placement import Holdings

BIG = ModelInfo(fingerprint="big", layers=(0,), num_experts=2)


def test_a_fresh_cluster_has_a_placement_at_once() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    assert cluster.order == (1, 1)
    assert cluster.names == ["s1"]
    assert cluster.members.ready


def test_each_change_makes_one_version_and_one_event() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(server("s2", 2))
    assert cluster.beat(1, state="draining") == "ok"
    assert cluster.beat(2, holdings={1: (0,)}) == "ok"
    cluster.leave(1)
    assert cluster.order == (1, 5)
    assert cluster.kinds.count("placement") == 5
    (left,) = cluster.members.placement.servers
    assert (left.name, left.holdings, left.state) == ("s2", {1: (0,)}, "serving")


def test_what_changes_no_placement_makes_no_version() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(client("c1", 2))
    cluster.beat(1, progress=5, counters={"requests": 3}, holdings=ALL)
    cluster.beat(2, progress=5)
    cluster.join(server("s1", 1))
    cluster.leave(2)
    cluster.pass_time(2, beating=(1,))
    assert cluster.order == (1, 1)


def test_a_draining_server_stays_in_the_placement() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.beat(1, state="draining")
    assert [s.state for s in cluster.members.placement.servers] == ["draining"]
    assert cluster.members.ready


@pytest.mark.parametrize(("silent", "lives"), [(0.0, True), (4.5, True), (5.0, True), (5.5, False)])
def test_a_lease_is_the_longest_silence(silent: float, lives: bool) -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(server("s2", 2))
    cluster.pass_time(silent, beating=(2,))
    assert cluster.names == (["s1", "s2"] if lives else ["s2"])
    assert cluster.members.leases_expired == (0 if lives else 1)
    assert [m.label for m in cluster.members.suspects] == ([] if lives else ["s1"])


def test_the_last_holder_becomes_suspect_when_its_lease_ends_and_its_return_heals_that() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.pass_time(6)
    assert (cluster.states, cluster.order) == ({"s1": "suspect"}, (1, 2))
    assert not cluster.members.ready
    assert cluster.beat(1) == "unknown"
    cluster.join(server("s1", 1), Known(1, 2, MONITOR))
    assert (cluster.states, cluster.order) == ({"s1": "serving"}, (1, 3))
    assert cluster.members.suspects == []
    assert cluster.members.ready


@pytest.mark.parametrize(
    ("held", "states"),
    [
        (ALL, {"s2": "serving"}),
        ({1: (0,), 2: (1,)}, {"s2": "serving"}),
        ({}, {"s1": "suspect", "s2": "serving"}),
        ({1: (1,), 2: (1,)}, {"s1": "suspect", "s2": "serving"}),
    ],
    ids=["all", "the same", "nothing", "a part"],
)
def test_a_suspect_stays_while_it_holds_what_no_other_does(
    held: Holdings, states: dict[str, str]
) -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1, {1: (0,), 2: (1,)}))
    cluster.join(server("s2", 2, held))
    cluster.pass_time(6, beating=(2,))
    assert cluster.states == states


def test_a_suspect_comes_back_into_the_placement_when_the_other_holder_falls_silent_too() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(server("s2", 2))
    cluster.pass_time(6, beating=(2,))
    assert cluster.states == {"s2": "serving"}
    cluster.pass_time(6)
    assert cluster.states == {"s1": "suspect", "s2": "suspect"}


def test_a_suspect_stays_beside_a_holder_that_drains() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(server("s2", 2))
    cluster.beat(2, state="draining")
    for _ in range(12):
        cluster.pass_time(0.5)
        cluster.beat(2, state="draining")
    assert cluster.states == {"s1": "suspect", "s2": "draining"}
    assert cluster.members.ready


@pytest.mark.parametrize(("silent", "states"), [(50.0, {"s1": "suspect"}), (50.5, {})])
def test_a_suspect_is_gone_after_ten_leases(silent: float, states: dict[str, str]) -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.pass_time(silent)
    assert cluster.states == states


def test_a_suspect_is_gone_when_it_leaves_or_another_life_has_come() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(server("s2", 2, {1: (0,)}))
    cluster.pass_time(6)
    assert cluster.states == {"s1": "suspect", "s2": "suspect"}
    assert cluster.leave(2)
    assert cluster.states == {"s1": "suspect"}
    cluster.join(server("s1", 3, {}))
    assert cluster.states == {"s1": "serving"}
    cluster.leave(3)
    assert cluster.states == {}, "the old life is gone, though its name is free again"


def test_of_two_lives_that_fell_silent_the_newer_one_is_suspect() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1, address="unix:@a"))
    cluster.pass_time(6)
    cluster.join(server("s1", 2, address="unix:@b"))
    cluster.pass_time(6)
    assert [s.address for s in cluster.members.placement.servers] == ["unix:@b"]


def test_a_suspect_of_another_model_is_no_longer_placed() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.pass_time(6)
    cluster.join(server("s2", 2, {0: (0,)}, model=BIG))
    assert cluster.states == {"s2": "serving"}


def test_a_new_life_takes_the_place_of_the_old_one_at_once() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(server("s1", 9))
    assert [s.instance for s in cluster.members.placement.servers] == [9]
    assert cluster.beat(1) == "gone"
    assert cluster.beat(9) == "ok"
    assert cluster.beat(77) == "unknown"


def test_a_life_that_expired_before_its_successor_came_is_gone_too() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.pass_time(6)
    cluster.join(server("s1", 9))
    assert cluster.beat(1) == "gone"
    assert cluster.members.suspects == []


def test_of_two_servers_with_one_name_the_newest_join_wins_until_it_leaves() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1, address="unix:@a"))
    cluster.join(server("s1", 2, address="unix:@b"))
    assert [s.address for s in cluster.members.placement.servers] == ["unix:@b"]
    with pytest.raises(ConfigError, match="another live server s1 has taken the name s1"):
        cluster.join(server("s1", 1, address="unix:@a"), takeover=False)
    cluster.leave(2)
    assert cluster.beat(1) == "unknown"
    cluster.join(server("s1", 1, address="unix:@a"), takeover=False)
    assert [s.address for s in cluster.members.placement.servers] == ["unix:@a"]


def test_clients_may_share_a_name_and_are_told_apart_by_label() -> None:
    cluster = Cluster()
    cluster.join(client("client", 1))
    cluster.join(client("client", 2))
    assert [m.label for m in cluster.members.clients] == ["client", "client-0000000000000002"]
    assert cluster.beat(1) == cluster.beat(2) == "ok"


def test_a_client_at_the_same_address_is_a_new_life() -> None:
    cluster = Cluster()
    cluster.join(client("c", 1, address="unix:@c"))
    cluster.join(client("c", 2, address="unix:@c"))
    assert [m.announcement.instance for m in cluster.members.clients] == [2]
    assert cluster.beat(1) == "gone"


def test_a_client_and_a_server_may_share_a_name() -> None:
    cluster = Cluster()
    cluster.join(server("x", 1))
    cluster.join(client("x", 2))
    assert cluster.beat(1) == cluster.beat(2) == "ok"
    assert cluster.members.clients[0].label == "x-0000000000000002"


def test_waking_from_a_suspension_declares_nobody_dead() -> None:
    cluster = Cluster(start=0)
    cluster.join(server("s1", 1))
    cluster.join(server("s2", 2))
    cluster.pass_time(2)
    cluster.now = 102.0
    cluster.members.tick(cluster.now)
    assert cluster.names == ["s1", "s2"]
    assert "suspend" in cluster.kinds
    # both were silent for 2 s of their 5 before the monitor stood still
    cluster.pass_time(3, beating=(2,))
    assert cluster.names == ["s1", "s2"]
    cluster.pass_time(1, beating=(2,))
    assert cluster.names == ["s2"]


def test_a_suspension_of_the_monitor_counts_for_no_suspect_either() -> None:
    cluster = Cluster(start=0)
    cluster.join(server("s1", 1))
    cluster.pass_time(6)
    cluster.now += 1000
    cluster.members.tick(cluster.now)
    assert cluster.states == {"s1": "suspect"}
    cluster.pass_time(44)
    assert cluster.states == {"s1": "suspect"}
    cluster.pass_time(1)
    assert cluster.states == {}


def test_a_heartbeat_that_arrives_before_the_first_tick_gets_no_longer_lease() -> None:
    cluster = Cluster(start=0)
    cluster.join(server("s1", 1))
    cluster.now = 1000.0
    assert cluster.beat(1) == "ok"
    cluster.members.tick(cluster.now)
    cluster.pass_time(LEASE)
    assert cluster.states == {"s1": "serving"}
    cluster.pass_time(0.5)
    assert cluster.states == {"s1": "suspect"}


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (ModelInfo(fingerprint="big", layers=(1, 2), num_experts=3), "'big'.* s1 serves .*'tiny'"),
        (ModelInfo(fingerprint="tiny", layers=(1,), num_experts=3), r"layers 1 to 1 \(1\)"),
        (ModelInfo(fingerprint="tiny", layers=(1, 2), num_experts=4), "4 experts.* 3 experts"),
    ],
    ids=["fingerprint", "layers", "experts"],
)
def test_a_server_of_another_model_is_refused(model: ModelInfo, text: str) -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    with pytest.raises(ConfigError, match=text):
        cluster.join(server("s2", 2, {}, model=model))
    assert (cluster.names, cluster.order) == (["s1"], (1, 1))


def test_the_model_may_change_when_no_other_live_server_serves_it() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(server("s1", 2, {0: (0,)}, model=BIG))
    assert cluster.members.missing() == [(0, 1)]
    cluster.leave(2)
    cluster.join(server("s3", 3))
    assert cluster.members.ready


@pytest.mark.parametrize("holdings", [{3: (0,)}, {1: (0, 3)}, {1: (-1,)}], ids=str)
def test_experts_that_the_model_does_not_have_are_refused(holdings: Holdings) -> None:
    cluster = Cluster()
    with pytest.raises(ConfigError, match=r"which its model \(.*\) does not have"):
        cluster.join(server("s1", 1, holdings))
    cluster.join(server("s1", 1))
    cluster.pass_time(4)
    with pytest.raises(ConfigError, match="does not have"):
        cluster.beat(1, holdings=holdings)
    cluster.pass_time(4)
    assert cluster.order == (1, 1), "the refused heartbeat was a sign of life all the same"


def test_a_server_without_a_model_may_only_stand_by() -> None:
    cluster = Cluster()
    with pytest.raises(ConfigError, match="server s1 holds experts but announces no model"):
        cluster.join(server("s1", 1, model=None))
    cluster.join(server("s2", 2, {}, model=None))
    assert cluster.names == ["s2"]
    assert cluster.members.not_ready == "no server has announced a model"
    cluster.join(server("s1", 1))
    cluster.join(server("s3", 3, {}, model=None))
    assert cluster.members.ready


@pytest.mark.parametrize(
    ("held", "missing"),
    [
        ([], []),
        ([{}], [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]),
        ([{1: (0, 1, 2)}], [(2, 0), (2, 1), (2, 2)]),
        ([{1: (0, 2)}, {1: (2,), 2: (0, 1)}], [(1, 1), (2, 2)]),
        ([{1: (0, 2)}, {1: (1,), 2: (0, 1, 2)}], []),
        ([ALL, ALL], []),
    ],
    ids=["nobody", "nothing held", "one layer", "holes", "exactly", "twice"],
)
def test_missing_lists_experts_without_a_live_holder(
    held: list[Holdings], missing: list[tuple[int, int]]
) -> None:
    cluster = Cluster()
    for i, holdings in enumerate(held):
        cluster.join(server(f"s{i}", i + 1, holdings))
    assert cluster.members.missing() == missing
    assert cluster.members.ready == (not missing and bool(held))


def test_the_experts_of_a_cluster_that_died_are_missing() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.pass_time(6)
    assert len(cluster.members.missing()) == 6
    assert cluster.members.not_ready == "experts without a live holder: 6"


def test_progress_that_stands_still_is_seen_though_heartbeats_come() -> None:
    cluster = Cluster(start=0)
    cluster.join(server("s1", 1))
    cluster.now = 1.0
    cluster.beat(1, progress=7)
    for cluster.now in (2.0, 3.0):
        cluster.beat(1, progress=7)
    (member,) = cluster.members.servers
    assert (member.seen_at, member.progress_at) == (3.0, 1.0)


def test_a_server_whose_progress_stands_still_for_a_lease_is_stuck_until_it_moves() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.pass_time(5, beating=(1,))
    assert not cluster.members.servers[0].stuck
    cluster.pass_time(2, beating=(1,))
    assert cluster.members.servers[0].stuck
    assert cluster.kinds.count("stuck") == 1
    cluster.beat(1, progress=1)
    cluster.pass_time(0.5, beating=())
    assert not cluster.members.servers[0].stuck
    assert cluster.states == {"s1": "serving"}, "who is slow is not dead"


def test_a_leave_of_a_stranger_changes_nothing() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    assert not cluster.leave(5)
    assert cluster.order == (1, 1)


def test_past_lives_and_events_are_bounded() -> None:
    cluster = Cluster()
    for instance in range(1, 2000):
        cluster.join(server("s1", instance, {}))
    assert cluster.beat(1998) == "gone"
    assert cluster.beat(1) == "unknown"
    assert len(cluster.members.log.since(0)) == 512
    assert cluster.order == (1, 1999)


@pytest.mark.parametrize("seed", range(5))
def test_placements_only_grow_and_show_the_live_servers(seed: int) -> None:
    choose = random.Random(seed)
    cluster = Cluster()
    orders = [cluster.order]
    for _ in range(400):
        instance = choose.randrange(1, 12)
        name = f"s{instance % 4}"
        action = choose.choice(["join", "beat", "leave", "wait", "sleep", "told"])
        if action in ("join", "told"):
            told = Known(choose.randrange(4), choose.randrange(50), choose.choice([0, 1, 2]))
            held = {1: tuple(range(choose.randrange(1, 4)))}
            cluster.join(server(name, instance, held), told if action == "told" else Known())
        elif action == "beat":
            cluster.beat(instance, state=choose.choice(["serving", "draining"]))
        elif action == "leave":
            cluster.leave(instance)
        elif action == "wait":
            cluster.pass_time(choose.choice([0.5, 3]))
        else:
            cluster.now += 20
        if not cluster.members.waiting and cluster.order > (0, 0):
            live = [m.announcement.server_info() for m in cluster.members.servers]
            placed = cluster.members.placement.servers
            assert [s for s in placed if s.state != "suspect"] == live
            silent = {m.announcement.instance for m in cluster.members.suspects}
            assert {s.instance for s in placed if s.state == "suspect"} <= silent
        orders.append(cluster.order)
    assert orders == sorted(orders)
