"""The monitor asks for the token: on every route but one, and off loopback always."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_eaas.monitor.routes
from tests.monitor.planned import client, server, wait_until
from torch_eaas.access import Access, Gate
from torch_eaas.config import MonitorConfig
from torch_eaas.errors import AccessDenied, ConfigError
from torch_eaas.monitor.agent import MonitorAgent, fetch_placement
from torch_eaas.monitor.app import MonitorHandle, serve_in_background
from torch_eaas.monitor.guard import TokenGuard

TOKEN = "sesame-0123456789"
ACCESS = Access(token=TOKEN)


@pytest.fixture(scope="module")
def locked() -> Iterator[MonitorHandle]:
    """A monitor that asks for a token."""
    with serve_in_background(MonitorConfig(access=ACCESS)) as handle:
        yield handle


@pytest.fixture(scope="module")
def stranger(locked: MonitorHandle) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=locked.url, trust_env=False, verify=False, timeout=5) as http:
        yield http


def routes() -> list[tuple[str, str]]:
    """Return method and path of every route that there is."""
    source = Path(torch_eaas.monitor.routes.__file__).read_text()
    found = re.findall(r'@router\.(\w+)\("(.*)"\)', source)
    assert ("post", "/join") in found
    return [*found, ("GET", "/nothing"), ("OPTIONS", "/join"), ("GET", "/healthz/")]


@pytest.mark.parametrize(("method", "path"), routes(), ids=lambda text: text.strip("/"))
def test_every_route_but_liveness_needs_the_token(
    stranger: httpx.Client, method: str, path: str
) -> None:
    answer = stranger.request(method, path)
    if path == "/healthz":
        assert answer.status_code == 200
        return
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "--token-file or TORCH_EAAS_TOKEN" in answer.json()["error"]
    good = {"Authorization": f"bearer {TOKEN}"}
    if path != "/events":
        assert stranger.request(method, path, headers=good).status_code != 401


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}, Bearer {TOKEN}",
        b"Bearer sesame-012345678\xe9",
    ],
    ids=ascii,
)
def test_what_is_not_the_token_is_turned_away(stranger: httpx.Client, value: str | bytes) -> None:
    assert stranger.get("/members", headers={"Authorization": value}).status_code == 401
    twice = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer x")]
    assert stranger.get("/members", headers=twice).status_code == 401


def test_a_large_body_without_the_token_is_turned_away_unread(stranger: httpx.Client) -> None:
    for _ in range(3):
        assert stranger.post("/join", content=b" " * (1 << 19)).status_code == 401


def test_those_turned_away_are_counted_and_the_log_has_no_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with serve_in_background(MonitorConfig(access=ACCESS)) as handle:
        bad = {"Authorization": "Bearer wrong-9876543210"}
        for _ in range(3):
            httpx.get(handle.url + "/members", headers=bad, trust_env=False, verify=False)
        good = {"Authorization": f"Bearer {TOKEN}"}
        text = httpx.get(handle.url + "/metrics", headers=good, trust_env=False, verify=False).text
    assert "torch_eaas_access_denied_total 3.0" in text
    assert caplog.text.count("turned away 127.0.0.1, '/members'") == 1
    assert not re.search("sesame|wrong-", caplog.text)


def test_members_show_the_token(locked: MonitorHandle) -> None:
    with MonitorAgent(locked.url, lambda: server("s1", 1), lambda _: None, access=ACCESS):
        wait_until(lambda: fetch_placement(locked.url, access=ACCESS).servers)
    with pytest.raises(AccessDenied, match="GET /placement: the token is missing or wrong"):
        fetch_placement(locked.url)


def test_a_member_without_the_token_is_told_so_and_not_that_the_monitor_is_away(
    locked: MonitorHandle, caplog: pytest.LogCaptureFixture
) -> None:
    with MonitorAgent(locked.url, lambda: client("c", 1), lambda _: None) as agent:
        wait_until(lambda: "refuses this member" in caplog.text)
        assert not agent.refresh(timedelta(seconds=1))
    assert "token is missing or wrong" in caplog.text
    assert "away" not in caplog.text.replace("turned away", "")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_a_monitor_that_others_reach_does_not_start_without_a_token(host: str) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=rf"listen on {re.escape(host)} \(--host\).*--token-file"):
        serve_in_background(MonitorConfig(host=host))
    assert threading.active_count() == before


def test_a_monitor_that_others_reach_without_tls_says_what_they_can_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve_in_background(MonitorConfig(host="0.0.0.0", access=ACCESS)):
        assert "listens on 0.0.0.0 without TLS" in caplog.text


HEADER = st.tuples(
    st.sampled_from([b"authorization", b"Authorization", b"x"]),
    st.binary(max_size=40) | st.binary(max_size=20).map(b"Bearer ".__add__),
)


@settings(max_examples=100)
@given(headers=st.lists(HEADER, max_size=3), path=st.text(max_size=100))
def test_no_headers_pass_without_the_token(headers: list[tuple[bytes, bytes]], path: str) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pytest.fail("a stranger was let in")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    scope = {"type": "http", "path": f"/{path}", "headers": headers, "client": None}
    asyncio.run(TokenGuard(app, Gate(ACCESS, "the monitor"))(scope, receive, send))
    assert sent[0]["status"] == 401
