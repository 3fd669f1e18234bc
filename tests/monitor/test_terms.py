from __future__ import annotations

import pytest

from tests.monitor.planned import LEASE, MONITOR, OTHER, Cluster, client, server
from torch_eaas.monitor.announcement import Known


@pytest.mark.parametrize("waited", [0.0, 2.5, 4.5])
def test_a_restarted_monitor_decides_nothing_for_a_lease(waited: float) -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1), Known(3, 40, OTHER))
    cluster.pass_time(waited, beating=(1,))
    assert (cluster.members.waiting, cluster.order, cluster.names) == (True, (0, 0), [])
    assert not cluster.members.ready
    assert "waits for members" in cluster.members.not_ready


def test_after_a_lease_it_numbers_above_all_that_it_was_told() -> None:
    cluster = Cluster()
    cluster.join(client("c1", 1), Known(2, 7, OTHER))
    cluster.join(server("s1", 2), Known(1, 50, 0xCCCC))
    cluster.join(server("s2", 3))
    cluster.pass_time(LEASE, beating=(1, 2, 3))
    assert (cluster.order, cluster.names) == ((3, 51), ["s1", "s2"])
    assert cluster.members.ready


def test_who_dies_while_the_monitor_waits_is_not_in_its_first_placement() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1), Known(1, 1, OTHER))
    cluster.join(server("s2", 2))
    cluster.leave(1)
    cluster.pass_time(LEASE, beating=(2,))
    assert (cluster.order, cluster.names) == ((2, 2), ["s2"])


def test_a_monitor_that_thought_itself_fresh_waits_when_it_hears_better() -> None:
    cluster = Cluster()
    cluster.join(server("new", 1))
    assert cluster.order == (1, 1)
    cluster.pass_time(2, beating=(1,))
    cluster.join(server("old", 2), Known(1, 50, OTHER))
    cluster.leave(1)
    assert (cluster.members.waiting, cluster.order, cluster.names) == (True, (1, 1), ["new"])
    # a lease since the start, of which 2 s have passed
    cluster.pass_time(2.5, beating=(2,))
    assert cluster.members.waiting
    cluster.pass_time(0.5, beating=(2,))
    assert (cluster.order, cluster.names) == ((2, 51), ["old"])


def test_later_in_life_it_waits_a_lease_from_the_news() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.pass_time(100, beating=(1,))
    cluster.join(server("s2", 2), Known(4, 2, OTHER))
    cluster.pass_time(4.5, beating=(1, 2))
    assert cluster.order == (1, 1)
    cluster.pass_time(0.5, beating=(1, 2))
    assert (cluster.order, cluster.names) == ((5, 3), ["s1", "s2"])


def test_a_heartbeat_tells_of_another_monitor_as_well_as_a_join() -> None:
    cluster = Cluster()
    cluster.join(client("c1", 1))
    cluster.beat(1, known=Known(6, 9))
    assert cluster.members.waiting
    cluster.pass_time(LEASE, beating=(1,))
    assert cluster.order == (7, 10)


@pytest.mark.parametrize(
    ("known", "waits"),
    [
        (Known(), False),
        (Known(1, 1, MONITOR), False),
        (Known(1, 1), False),
        (Known(1, 2), True),
        (Known(2, 0), True),
        # equal numbers of two monitors may name different placements
        (Known(1, 1, OTHER), True),
        (Known(1, 0, OTHER), True),
    ],
    ids=["none", "ours", "ours by hearsay", "above", "term above", "tie", "tie below"],
)
def test_only_a_placement_that_may_be_newer_makes_it_wait(known: Known, waits: bool) -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(client("c1", 2), known)
    assert cluster.members.waiting == waits


def test_news_during_the_wait_does_not_lengthen_it() -> None:
    cluster = Cluster()
    cluster.join(client("c1", 1), Known(1, 1, OTHER))
    cluster.pass_time(3, beating=(1,))
    cluster.join(client("c2", 2), Known(8, 1, OTHER))
    cluster.pass_time(2, beating=(1, 2))
    assert cluster.order == (9, 2)


def test_what_is_told_again_of_the_past_does_not_make_it_wait_again() -> None:
    cluster = Cluster()
    cluster.join(client("c1", 1), Known(3, 3, OTHER))
    cluster.pass_time(LEASE, beating=(1,))
    assert cluster.order == (4, 4)
    cluster.beat(1, known=Known(3, 3, OTHER))
    assert not cluster.members.waiting


def test_the_wait_is_no_shorter_for_a_suspension() -> None:
    cluster = Cluster()
    cluster.join(client("c1", 1), Known(1, 1, OTHER))
    cluster.pass_time(1, beating=(1,))
    cluster.now += 100
    cluster.members.tick(cluster.now)
    assert cluster.members.waiting
    cluster.pass_time(4, beating=(1,))
    assert cluster.order == (2, 2)
