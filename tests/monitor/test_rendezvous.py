from __future__ import annotations

import threading
import time
from datetime import timedelta

import httpx
import pytest

from torch_eaas.access import Access
from torch_eaas.config import MonitorConfig
from torch_eaas.errors import AccessDenied, ConfigError, PeerTimeout, RequestRefused
from torch_eaas.monitor.app import MonitorHandle, serve_in_background
from torch_eaas.monitor.link import MonitorLink
from torch_eaas.monitor.rendezvous import (
    FORGOTTEN_S,
    MAX_BYTES,
    MAX_NAMES,
    Rendezvous,
    exchange_at,
    leave,
    wait_for,
)

SECOND = timedelta(seconds=1)
NONE = timedelta(0)


def test_what_is_left_is_found_by_all_until_it_is_forgotten() -> None:
    place = Rendezvous()
    assert place.get("job", 0.0) is None
    place.put("job", b"\0id", 1.0)
    place.put("job", b"\0id", 2.0)
    assert [place.get("job", now) for now in (2.0, 2.0 + FORGOTTEN_S)] == [b"\0id"] * 2
    assert place.get("job", 2.1 + FORGOTTEN_S) is None
    place.put("job", b"other", 2.1 + FORGOTTEN_S)


def test_a_name_is_not_given_away_twice() -> None:
    place = Rendezvous()
    place.put("job", b"1", 0.0)
    with pytest.raises(ConfigError, match=r"'job' is taken: .*a name of its own, or wait 600 s"):
        place.put("job", b"2", FORGOTTEN_S)
    assert place.get("job", FORGOTTEN_S) == b"1"


def test_names_are_bounded() -> None:
    place = Rendezvous()
    for i in range(MAX_NAMES):
        place.put(str(i), b"", 0.0)
    with pytest.raises(ConfigError, match="64 names are taken; each is forgotten after 600 s"):
        place.put("more", b"", 0.0)
    place.put("more", b"", 0.1 + FORGOTTEN_S)


def test_members_meet_at_the_monitor(monitor: MonitorHandle) -> None:
    data = bytes(range(256)) * 16
    found: list[bytes] = []

    def come() -> None:
        with MonitorLink(monitor.url, SECOND) as link:
            found.append(exchange_at(link, "run-7.0", 5 * SECOND, who="PE 1")(None))

    waiting = threading.Thread(target=come)
    waiting.start()
    with MonitorLink(monitor.url, SECOND) as link:
        assert exchange_at(link, "run-7.0", SECOND, who="PE 0")(data) == data
        waiting.join(5)
        assert found == [data]
        with pytest.raises(RequestRefused, match=r"PUT /rendezvous/run-7\.0: 'run-7\.0' is"):
            leave(link, "run-7.0", b"others")


def test_who_waits_in_vain_is_told_how_long_and_for_whom(monitor: MonitorHandle) -> None:
    match = r"PE 3 waited 0.2 s at http.* for what PE 0 leaves under 'x': .*nothing lay there; has"
    started = time.monotonic()
    with MonitorLink(monitor.url, SECOND) as link, pytest.raises(PeerTimeout, match=match):
        wait_for(link, "x", 0.2 * SECOND, who="PE 3", whom="PE 0")
    assert time.monotonic() - started < 3


def test_a_monitor_that_is_away_is_asked_until_the_deadline() -> None:
    with (
        MonitorLink("http://127.0.0.1:9", SECOND) as link,
        pytest.raises(PeerTimeout, match=r"PE 1 waited 0.2 s .*GET /rendezvous/x: .*refused"),
    ):
        wait_for(link, "x", 0.2 * SECOND, who="PE 1", whom="PE 0")


def test_without_the_token_nobody_meets() -> None:
    config = MonitorConfig(access=Access(token="t" * 16))
    with serve_in_background(config) as handle, MonitorLink(handle.url, SECOND) as link:
        with pytest.raises(AccessDenied, match="the token is missing or wrong"):
            wait_for(link, "x", NONE, who="PE 1", whom="PE 0")
        with pytest.raises(AccessDenied, match="the token is missing or wrong"):
            leave(link, "x", b"")


def test_more_than_4096_bytes_are_refused_on_both_sides(calm: httpx.Client) -> None:
    with MonitorLink(str(calm.base_url), SECOND) as link:
        with pytest.raises(ConfigError, match="a rendezvous holds at most 4096 bytes, got 4097"):
            leave(link, "big", bytes(MAX_BYTES + 1))
        leave(link, "big", bytes(MAX_BYTES))
    answer = calm.put("/rendezvous/bigger", json={"data": "AAAA" * 1367})
    assert (answer.status_code, "data: " in answer.text) == (422, True)


@pytest.mark.parametrize("body", [{}, {"data": "?"}, {"data": 7}, {"data": "QQ==", "more": 1}])
def test_a_body_that_is_none_is_refused(calm: httpx.Client, body: dict[str, object]) -> None:
    assert calm.put("/rendezvous/x", json=body).status_code == 422
    assert calm.get("/rendezvous/x").json() == {"data": None}


@pytest.mark.parametrize("name", ["a%20b", "x" * 129, "%00"])
def test_a_name_that_is_none_is_refused(calm: httpx.Client, name: str) -> None:
    assert calm.put(f"/rendezvous/{name}", json={"data": "QQ=="}).status_code == 422
    with (
        MonitorLink(str(calm.base_url), SECOND) as link,
        pytest.raises(RequestRefused, match="name: String should match"),
    ):
        wait_for(link, name, NONE, who="PE 1", whom="PE 0")
