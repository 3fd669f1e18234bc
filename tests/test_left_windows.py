"""Windows that were left stay mapped until nobody can write there; then they go, and their link."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from tests.device_served import BRIEF, E, every_expert, inputs, world
from tests.monitor.planned import wait_until
from tests.ops.processes import needs_x86
from torch_eaas import left_windows
from torch_eaas.left_windows import LeftWindows


class Pair:
    """What ``LeftWindows`` looks at."""

    def __init__(self, epoch: int = 1) -> None:
        self.link = SimpleNamespace(closed=False)
        self.pair = SimpleNamespace(open_epoch=0)
        self.epoch = epoch
        self.was_cut = False
        self.is_bound = False
        self.num_in_use = 0
        self.server = SimpleNamespace(instance=7)


def left(*pairs: Pair) -> LeftWindows:
    windows = LeftWindows()
    for pair in pairs:
        windows.add(pair)  # type: ignore[arg-type]  # all that it looks at
    return windows


def test_a_window_is_kept_while_its_server_may_write_there() -> None:
    windows = left(Pair())
    assert windows.forget_harmless() == []
    assert len(windows) == 1


def test_a_window_goes_once_its_server_has_ended() -> None:
    pair, other = Pair(), Pair()
    windows = left(pair, other)
    pair.link.closed = True
    assert windows.forget_harmless() == [pair.link]
    assert len(windows) == 1


def test_memory_in_use_here_holds_up_the_next_pair_though_the_link_was_cut() -> None:
    pair = Pair()
    pair.link.closed, pair.is_bound, pair.num_in_use = True, True, 1
    windows = left(pair)
    assert windows.forget_harmless() == []
    assert windows.holds_up(7)
    assert not windows.holds_up(8)
    pair.num_in_use = 0
    assert not windows.holds_up(7)
    assert windows.forget_harmless() == [pair.link]


def test_a_link_that_the_client_gave_up_itself_tells_nothing_of_its_server() -> None:
    pair = Pair()
    pair.was_cut, pair.link.closed = True, True
    assert left(pair).forget_harmless() == []


@pytest.mark.parametrize(("opened", "goes"), [(2, False), (3, True)], ids=["the same", "later"])
def test_a_window_goes_once_a_later_one_of_the_pair_is_open(opened: int, goes: bool) -> None:
    pair = Pair(epoch=2)
    pair.pair.open_epoch = opened
    assert left(pair).forget_harmless() == ([pair.link] if goes else [])


def test_what_may_still_be_written_when_the_client_closes_stays_until_the_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(left_windows.atexit, "register", lambda *call: kept.append(call))
    pair, ended = Pair(), Pair()
    ended.link.closed = True
    windows = left(pair, ended)
    assert windows.close() == [ended.link, pair.link]
    assert [call[1] for call in kept] == [pair]
    assert len(windows) == 0


@needs_x86
def test_a_hung_servers_window_stays_mapped_and_goes_when_it_has_opened_another() -> None:
    every = every_expert(1)
    with world(every, every) as servers:
        client = servers.client(graph_wait=BRIEF)

        def call() -> None:
            client.combine(client.dispatch(0, *inputs(), num_experts=E))

        call()
        hung = servers.experts[1]
        hung.stop()
        memory = weakref.ref(client._connections.live["s1"]._replies.owner)
        call()
        client.refresh()
        assert "s1" not in client._connections.live
        gc.collect()
        # the server can still write, and the tables know the window no more
        assert memory() is not None
        assert len(client._connections.left) == 1
        hung.go.set()
        wait_until(lambda: not len(client._connections.left))
        gc.collect()
        assert memory() is None
        assert client._connections.live["s1"].epoch > 1
        call()
