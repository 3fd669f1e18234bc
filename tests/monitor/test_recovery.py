"""Who is asked to load what nobody holds, on a planned clock."""

from __future__ import annotations

import pytest

from tests.monitor.planned import ALL, LEASE, MONITOR, Cluster, server
from torch_eaas.monitor.announcement import Known
from torch_eaas.monitor.recovery import Pair, plan_loads
from torch_eaas.placement import Holdings

ONE: Holdings = {1: (0, 1, 2)}
TWO: Holdings = {2: (0, 1, 2)}
PAIRS = [(1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("wanted", "rooms", "plan"),
    [
        pytest.param([], {7: 3}, [], id="nothing wanted"),
        pytest.param(PAIRS, {}, [], id="nobody there"),
        pytest.param(PAIRS, {7: 0, 9: 0}, [], id="no room"),
        pytest.param(PAIRS, {7: 3}, [7, 7, 7], id="one has all the room"),
        pytest.param(PAIRS, {7: 2}, [7, 7], id="never more than the room"),
        pytest.param(PAIRS, {9: 5, 7: 5}, [9, 7, 9], id="equal servers take turns"),
        pytest.param(PAIRS, {7: 2, 9: 9}, [9, 9, 9], id="most room first"),
        pytest.param(PAIRS, {7: 2, 9: 3}, [9, 7, 9], id="until another has more left"),
        pytest.param(PAIRS[::-1], {7: 1, 9: 1}, [7, 9], id="in the order of the experts"),
    ],
)
def test_experts_go_to_those_with_most_room_left(
    wanted: list[Pair], rooms: dict[int, int], plan: list[int]
) -> None:
    assert plan_loads(wanted, rooms) == dict(zip(PAIRS, plan, strict=False))


def standby(cluster: Cluster, name: str, instance: int, room: int = 6) -> None:
    cluster.join(server(name, instance, {}, room=room))


def silent(cluster: Cluster, *others: int, seconds: float = LEASE + 0.5, room: int = 6) -> None:
    """Let time pass in which only some members report, with the room that they have."""
    for _ in range(round(seconds / 0.5)):
        cluster.now += 0.5
        for instance in others:
            cluster.beat(instance, room=room)
        cluster.members.tick(cluster.now)


def after_a_loss(*others: int, room: int = 6) -> Cluster:
    """Return a cluster whose holder s1 has fallen silent; the others stand by with room."""
    cluster = Cluster()
    cluster.join(server("s1", 1))
    for instance in others:
        standby(cluster, f"s{instance}", instance, room)
    silent(cluster, *others, room=room)
    assert cluster.states["s1"] == "suspect"
    return cluster


def test_a_standby_is_asked_for_all_that_the_last_holder_held() -> None:
    cluster = after_a_loss(2)
    assert cluster.members.asked_of(2) == ALL
    assert cluster.members.asked_of(1) == {}
    assert cluster.kinds.count("ask") == 1, "an ask is repeated in answers, not in the log"


def test_nobody_is_asked_while_every_expert_is_held() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    standby(cluster, "s2", 2)
    silent(cluster, 1, 2, seconds=60)
    assert cluster.members.asked_of(2) == {}


def test_an_ask_shrinks_as_the_experts_are_held_and_ends_with_the_last() -> None:
    cluster = after_a_loss(2)
    cluster.beat(2, holdings=ONE, room=3)
    assert cluster.members.asked_of(2) == TWO
    assert cluster.states == {"s1": "suspect", "s2": "serving"}
    cluster.beat(2, holdings=ALL, room=0)
    assert cluster.members.asked_of(2) == {}
    assert cluster.states == {"s2": "serving"}
    assert cluster.members.ready


def test_two_standbys_share_and_none_is_asked_for_more_than_its_room() -> None:
    cluster = after_a_loss(2, 3, room=2)
    asked = [cluster.members.asked_of(instance) for instance in (2, 3)]
    assert asked == [{1: (0, 2)}, {1: (1,), 2: (0,)}]
    # what is asked takes room already, though the server does not say so yet
    silent(cluster, 2, 3, room=2, seconds=1)
    assert [cluster.members.asked_of(instance) for instance in (2, 3)] == asked


def test_an_ask_ends_when_somebody_else_holds_the_expert() -> None:
    cluster = after_a_loss(2)
    cluster.join(server("s1", 9))
    assert cluster.members.asked_of(2) == {}


def test_an_ask_moves_when_its_server_falls_silent() -> None:
    cluster = after_a_loss(2, 3)
    assert cluster.members.asked_of(2) == {1: (0, 2), 2: (1,)}
    silent(cluster, 3)
    assert cluster.members.asked_of(3) == ALL


def test_an_ask_moves_when_its_server_does_not_load_within_the_time_limit() -> None:
    cluster = after_a_loss(2)
    silent(cluster, 2, seconds=59)
    standby(cluster, "s3", 3)
    assert cluster.members.asked_of(2) == ALL
    silent(cluster, 2, 3, seconds=2)
    assert (cluster.members.asked_of(2), cluster.members.asked_of(3)) == ({}, ALL)
    assert "late" in cluster.kinds


def test_the_time_limit_counts_from_the_last_that_was_loaded() -> None:
    cluster = after_a_loss(2)
    silent(cluster, 2, seconds=59)
    cluster.beat(2, holdings=ONE, room=3)
    silent(cluster, 2, seconds=59, room=3)
    assert cluster.members.asked_of(2) == TWO
    assert "late" not in cluster.kinds


def test_a_server_that_says_that_it_failed_rests_and_the_next_one_is_asked_at_once() -> None:
    cluster = after_a_loss(2)
    standby(cluster, "s3", 3)
    cluster.beat(2, room=6, trouble="OSError: no such file")
    assert (cluster.members.asked_of(2), cluster.members.asked_of(3)) == ({}, ALL)
    (event,) = (e for e in cluster.members.log.since(0) if e.kind == "trouble")
    assert event.text == "server s2 could not load: OSError: no such file"


def test_a_server_that_failed_is_asked_again_after_a_rest_if_there_is_no_other() -> None:
    cluster = after_a_loss(2)
    cluster.beat(2, room=6, trouble="OSError")
    assert cluster.members.asked_of(2) == {}
    silent(cluster, 2, seconds=LEASE)
    assert cluster.members.asked_of(2) == ALL


def test_while_a_cluster_starts_nobody_is_asked_for_what_is_still_on_its_way() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1, ONE))
    standby(cluster, "s2", 2)
    silent(cluster, 1, 2, seconds=29)
    assert cluster.members.asked_of(2) == {}
    silent(cluster, 1, 2, seconds=2)
    assert [cluster.members.asked_of(i) for i in (1, 2)] == [{2: (0, 2)}, {2: (1,)}]


def test_a_monitor_that_waits_for_members_asks_nobody() -> None:
    cluster = Cluster()
    cluster.join(server("s2", 2, {}, room=6), Known(3, 1, MONITOR + 1))
    cluster.now += 0.4 * LEASE
    cluster.beat(2, room=6)
    assert cluster.members.waiting
    assert cluster.members.asked_of(2) == {}


def test_a_standby_of_no_model_is_asked_nothing() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(server("s2", 2, {}, model=None, room=6))
    silent(cluster, 2)
    assert cluster.members.asked_of(2) == {}


def test_what_a_draining_server_holds_last_is_loaded_elsewhere() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(server("s2", 2, ONE, room=3))
    assert cluster.members.pending(1) == 0
    cluster.beat(1, state="draining")
    assert cluster.members.pending(1) == 3
    assert (cluster.members.asked_of(1), cluster.members.asked_of(2)) == ({}, TWO)
    cluster.beat(2, holdings=ALL, room=0)
    assert cluster.members.pending(1) == 0
    assert cluster.states == {"s1": "draining", "s2": "serving"}


@pytest.mark.parametrize("room", [0, 2], ids=["none", "for some"])
def test_a_draining_server_is_told_when_nobody_has_room(room: int) -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    standby(cluster, "s2", 2, room)
    cluster.beat(1, state="draining")
    if room:
        assert cluster.members.pending(1) == 6
        cluster.beat(2, holdings={1: (0, 1)}, room=0)
    assert cluster.members.pending(1) == 0


def test_a_suspension_of_the_monitor_ends_no_ask() -> None:
    cluster = after_a_loss(2)
    cluster.now += 1000
    cluster.members.tick(cluster.now)
    silent(cluster, 2, seconds=50)
    assert cluster.members.asked_of(2) == ALL
    assert "late" not in cluster.kinds
