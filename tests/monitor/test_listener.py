"""A member hears of the monitor's events at once, and needs none of them."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.monitor.party import SHORT, Start
from tests.monitor.planned import client, server, wait_until
from tests.monitor.scripted import HEAD, ScriptedStream, frame
from torch_eaas.access import Access
from torch_eaas.config import MonitorConfig
from torch_eaas.errors import TransportError
from torch_eaas.monitor.agent import MonitorAgent
from torch_eaas.monitor.announcement import instance_text
from torch_eaas.monitor.app import MonitorHandle, serve_in_background
from torch_eaas.monitor.link import MonitorLink, Reply
from torch_eaas.monitor.listener import LONGEST_EVENT, EventListener, Heard, read_events

SLOW = MonitorConfig(heartbeat=timedelta(seconds=20), lease=timedelta(seconds=60))
AT_ONCE = 2.0
"""Seconds, on a busy machine: a tenth of a slow heartbeat."""

Listen = Callable[..., tuple[EventListener, list[tuple[str, tuple[int, int]]]]]


@pytest.fixture
def slow() -> Iterator[MonitorHandle]:
    """A monitor whose heartbeats are too rare to tell anything in a test's time."""
    with serve_in_background(SLOW) as handle:
        yield handle


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Starts listeners, and returns each with what it has heard so far."""
    begun: list[EventListener] = []

    def new(
        url: str, silence: float = 5.0, access: Access = SLOW.access
    ) -> tuple[EventListener, list[tuple[str, tuple[int, int]]]]:
        heard: list[tuple[str, tuple[int, int]]] = []
        link = MonitorLink(url, SHORT, access)
        listener = EventListener(link, lambda kind, order: heard.append((kind, order)))
        begun.append(listener)
        listener.start(silence)
        return listener, heard

    yield new
    for listener in begun:
        listener.close()
    assert not listening()


def listening() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "eaas-events"]


def post(url: str, path: str, body: dict[str, object]) -> None:
    with MonitorLink(url, timedelta(seconds=5)) as link:
        link.call("POST", path, body)


# -- with a real monitor -----------------------------------------------------------------------


def test_a_new_placement_reaches_members_long_before_their_next_heartbeat(
    slow: MonitorHandle, start: Start
) -> None:
    parties = [start(slow.url, client("c", 1)), start(slow.url, server("s1", 2))]
    for names, path, body in [
        (["s1"], "", {}),
        (["s1", "s2"], "/join", server("s2", 3).to_json()),
        (["s1"], "/leave", {"instance": instance_text(3)}),
    ]:
        if path:
            post(slow.url, path, body)
        for party in parties:
            wait_until(lambda p=party, n=names: p.names == n, AT_ONCE)  # type: ignore[misc]


def test_a_death_reaches_members_when_the_monitor_knows_it(
    slow: MonitorHandle, start: Start
) -> None:
    party = start(slow.url, client("c", 1))
    post(slow.url, "/join", server("s1", 2).to_json())
    wait_until(lambda: party.names == ["s1"], AT_ONCE)
    # another life is the proof that the first one has ended
    post(slow.url, "/join", server("s1", 3).to_json())
    wait_until(lambda: party.placements[-1].servers[0].instance == 3, AT_ONCE)


def test_a_server_is_asked_to_load_long_before_its_next_heartbeat(slow: MonitorHandle) -> None:
    replies: list[Reply] = []
    standby = server("standby", 1, {}, room=6)
    post(slow.url, "/join", server("last", 2).to_json())
    with MonitorAgent(slow.url, lambda: standby, lambda _: None, on_reply=replies.append):
        wait_until(lambda: replies)
        assert not any(reply.load for reply in replies)
        post(slow.url, "/leave", {"instance": instance_text(2)})
        wait_until(lambda: replies[-1].load == {1: (0, 1, 2), 2: (0, 1, 2)}, AT_ONCE)


def test_many_events_make_few_reports(
    slow: MonitorHandle, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = start(slow.url, client("c", 1))
    wait_until(lambda: party.placements)
    reports: list[str] = []
    report = MonitorLink.report

    def counted(link: MonitorLink, path: str, body: dict[str, object]) -> Reply:
        reports.append(path)
        return report(link, path, body)

    monkeypatch.setattr(MonitorLink, "report", counted)
    began = time.monotonic()
    with MonitorLink(slow.url, timedelta(seconds=5)) as link:
        for i in range(40):
            link.call("POST", "/join", server(f"s{i}", i + 2).to_json())
    wait_until(lambda: len(party.names) == 40, AT_ONCE)
    # one for each rest of 50 ms, and one at each end
    assert len(reports) <= 2 + (time.monotonic() - began) / 0.05


def test_heartbeats_tell_it_where_the_stream_never_opens(
    monitor: MonitorHandle, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no stream")

    monkeypatch.setattr(MonitorLink, "events", fail)
    party = start(monitor.url, client("c", 1))
    start(monitor.url, server("s1", 2))
    wait_until(lambda: party.names == ["s1"])


def test_the_stream_is_for_those_who_have_the_token(
    listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "torch_eaas.monitor.listener")
    access = Access(token="sesame-0123456789")
    with serve_in_background(MonitorConfig(access=access)) as handle:
        _, heard = listen(handle.url, access=access)
        _, nothing = listen(handle.url)
        wait_until(lambda: heard == [("resync", (0, 0))])
        wait_until(lambda: "GET /events: status 401, 'application/json', no event" in caplog.text)
    assert nothing == []


def test_a_monitor_that_returns_is_listened_to_again(free_port: int, listen: Listen) -> None:
    url = f"http://127.0.0.1:{free_port}"
    _, heard = listen(url)
    config = MonitorConfig(port=free_port)
    with serve_in_background(config):
        wait_until(lambda: len(heard) == 1)
    with serve_in_background(config):
        # another life's events cannot be resumed from
        wait_until(lambda: len(heard) == 2)
    assert [kind for kind, _ in heard] == ["resync", "resync"]


# -- with a monitor that fails -----------------------------------------------------------------


def test_a_broken_stream_goes_on_after_the_last_event_heard(listen: Listen) -> None:
    frames = [frame(7) + frame(8, version=2)[:20], frame(8, version=2)]

    def answer(sock: socket.socket) -> None:
        sock.sendall(HEAD + frames.pop(0) if frames else HEAD)
        if len(frames) == 1:
            sock.close()

    with ScriptedStream(answer) as stream:
        _, heard = listen(stream.url)
        wait_until(lambda: len(heard) == 2)
    assert heard == [("placement", (1, 1)), ("placement", (1, 2))]
    first, second = stream.requests
    assert "last-event-id" not in first.lower()
    assert f"last-event-id: {'0' * 16}-7\r\n" in second.lower()


@pytest.mark.parametrize(
    "answer", [b"", HEAD, HEAD + frame(1)[:30]], ids=["no head", "head", "cut"]
)
def test_a_monitor_that_hangs_is_called_again_after_a_lease(answer: bytes, listen: Listen) -> None:
    with ScriptedStream(lambda sock: sock.sendall(answer)) as stream:
        listen(stream.url, 0.2)
        wait_until(lambda: len(stream.requests) >= 3)


@pytest.mark.parametrize("answer", [b"", HEAD, HEAD + frame(1)], ids=["no head", "head", "event"])
def test_closing_hangs_up_at_once_on_a_monitor_that_says_nothing(
    answer: bytes, listen: Listen
) -> None:
    with ScriptedStream(lambda sock: sock.sendall(answer)) as stream:
        listener, _ = listen(stream.url, 60.0)
        wait_until(lambda: stream.requests)
        time.sleep(0.05)
        began = time.monotonic()
        listener.close()
        listener.close()
        assert not listening()
        assert time.monotonic() - began < 0.4


def test_a_stream_that_breaks_again_and_again_is_called_less_and_less(listen: Listen) -> None:
    with ScriptedStream(lambda sock: sock.close()) as stream:
        listen(stream.url)
        time.sleep(1.0)
        # with waits of 0.1, 0.2, 0.4 s, each at least halved by chance
        assert 2 <= len(stream.requests) <= 5


def test_a_listener_that_was_never_started_closes(listen: Listen) -> None:
    listener = EventListener(MonitorLink("http://127.0.0.1:1", SHORT), lambda *_: None)
    listener.close()
    listener.start(1.0)
    assert not listening()


# -- the bytes ---------------------------------------------------------------------------------

STREAM = frame(1, "resync", 0, 0) + b": keepalive\n\n" + frame(2, "ask", 3, 4) + frame(3, "x")[:9]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 63, len(STREAM)])
def test_events_are_the_same_however_the_stream_is_cut(size: int) -> None:
    pieces = (STREAM[at : at + size] for at in range(0, len(STREAM), size))
    life = "0" * 16
    assert list(read_events(pieces)) == [
        Heard(f"{life}-1", "resync", (0, 0)),
        Heard(f"{life}-2", "ask", (3, 4)),
    ]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"x" * (LONGEST_EVENT + 1), "an event of a monitor has at most 65536 bytes"),
        (b"\xff\n\n", r"not an event of a monitor: b'\\xff'"),
        (b"nonsense\n\n", "not an event of a monitor: b'nonsense'"),
        (b"id: 1\nevent: x\n\n", "not an event of a monitor"),
        (frame(1).replace(b'"term": 1', b'"term": "x"'), "not an event of a monitor"),
        (frame(1).replace(b'"term": 1', b'"term": Infinity'), "not an event of a monitor"),
        (b"id: 1\nevent: x\ndata: " + b"[" * 60000 + b"\n\n", "not an event of a monitor"),
        (frame(1).replace(b"0-1", b"0-1\r"), r"not the id of an event: '0{16}-1\\r'"),
    ],
    ids=["endless", "bytes", "no fields", "no data", "term", "infinite", "deep", "id"],
)
def test_what_is_no_event_is_an_error(stream: bytes, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        list(read_events([stream]))


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(frame(1)), st.just(b"\n\n"))))
def test_bytes_are_events_or_an_error_of_ours(pieces: list[bytes]) -> None:
    with contextlib.suppress(TransportError):
        for event in read_events(pieces):
            assert event.id == f"{'0' * 16}-1"
