from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import httpx
import pytest

from tests.monitor.planned import server
from torch_eaas.errors import ConfigError, PeerGone, PeerTimeout, RequestRefused, TransportError
from torch_eaas.monitor.app import MonitorHandle
from torch_eaas.monitor.link import MonitorLink, fetch_placement
from torch_eaas.placement import Placement

SHORT = timedelta(seconds=0.3)


@pytest.fixture
def stranger(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of something that answers each connection with the test's bytes, or not at all."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(5)

        def answer() -> None:
            conn, _ = sock.accept()
            with conn:
                conn.recv(1 << 16)
                conn.sendall(request.param)
                if not request.param:
                    conn.settimeout(2)
                    conn.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        thread.join()


def reply(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def test_a_placement_is_fetched(monitor: MonitorHandle) -> None:
    assert fetch_placement(monitor.url).order == (0, 0)
    said = server("s1", 1)
    httpx.post(monitor.url + "/join", json=said.to_json(), trust_env=False, verify=False)
    assert fetch_placement(monitor.url + "/") == Placement((said.server_info(),), 1, 1)


@pytest.mark.parametrize(
    ("stranger", "error", "text"),
    [
        (b"", PeerTimeout, "GET /placement: no answer in time"),
        (b"garbage\r\n\r\n", PeerGone, "GET /placement"),
        (reply("200 OK", "<html>"), TransportError, "status 200, no JSON"),
        (reply("200 OK", "[]"), TransportError, "not a monitor's answer"),
        (reply("200 OK", "{}"), TransportError, "shows none: .*servers"),
        (reply("500 Oops", "{}"), TransportError, "status 500"),
        (reply("403 No", '{"error": "token needed"}'), RequestRefused, "token needed"),
        (reply("404 No", "{}"), RequestRefused, "404"),
    ],
    indirect=["stranger"],
    ids=["silent", "garbage", "html", "list", "empty", "failing", "refusing", "wordless"],
)
def test_what_is_no_monitor_is_an_error_with_a_name(
    stranger: str, error: type[TransportError], text: str
) -> None:
    with pytest.raises(error, match=text):
        fetch_placement(stranger, SHORT)


def test_nobody_there_is_an_error_with_a_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(PeerGone, match=f"monitor http://127.0.0.1:{port}: GET /placement"):
        fetch_placement(f"http://127.0.0.1:{port}", SHORT)


def test_a_link_that_is_closed_says_so(calm: httpx.Client) -> None:
    link = MonitorLink(str(calm.base_url), SHORT)
    link.close()
    link.close()
    with pytest.raises(PeerGone, match="closed"):
        link.placement()


def test_a_join_that_no_monitor_answers_is_an_error(calm: httpx.Client) -> None:
    with (
        MonitorLink(str(calm.base_url), SHORT) as link,
        pytest.raises(TransportError, match="no monitor"),
    ):
        link.report("/leave", {"instance": "0" * 16})


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        fetch_placement("localhost", SHORT)


@pytest.mark.parametrize("load", [5, {"x": [1]}, {"1": 3}, {"1": ["x"]}], ids=str)
def test_an_answer_that_asks_for_no_experts_is_no_monitors(
    load: object, black_hole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"status": "ok", "term": 1, "version": 1, "load": load}
    monkeypatch.setattr(MonitorLink, "call", lambda *_: answer)
    link = MonitorLink(black_hole, SHORT)
    with link, pytest.raises(TransportError, match="/heartbeat is no monitor"):
        link.report("/heartbeat", {})
