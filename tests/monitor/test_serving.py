from __future__ import annotations

import asyncio
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import httpx
import pytest

from tests.monitor.planned import FAST, server, wait_until
from torch_eaas.access import Access
from torch_eaas.config import MonitorConfig
from torch_eaas.errors import ConfigError, PeerTimeout, TransportError
from torch_eaas.monitor import app
from torch_eaas.monitor.app import serve_in_background
from torch_eaas.monitor.service import Service
from torch_eaas.monitor.serving import MonitorServer

ACCESS = Access(token="a-token-of-this-test")
SERVER: dict[str, Any] = server("s1", 0xA1).to_json()


def test_closing_a_monitor_is_quick_with_a_listener_and_safe_twice() -> None:
    handle = serve_in_background(FAST)
    with httpx.stream("GET", handle.url + "/events", trust_env=False, verify=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        start = time.monotonic()
        handle.close()
        handle.close()
        assert time.monotonic() - start < 2
        assert "event: resync" in list(lines)


def test_a_background_monitor_answers_at_once_many_times_over() -> None:
    for _ in range(4):
        with serve_in_background(FAST) as handle:
            assert (
                httpx.get(handle.url + "/healthz", trust_env=False, verify=False).status_code == 200
            )


def test_many_monitors_at_once_take_different_ports() -> None:
    handles = [serve_in_background(FAST) for _ in range(4)]
    assert len({handle.url for handle in handles}) == 4
    for handle in handles:
        handle.close()


def test_a_port_that_is_taken_is_an_error_that_names_it(calm: httpx.Client) -> None:
    port = calm.base_url.port
    assert port is not None
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
        serve_in_background(MonitorConfig(port=port))


def test_a_start_that_fails_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(service: Service) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr(Service, "run", fail)
    with pytest.raises(TransportError, match=r"monitor at http://\S+ did not start$"):
        serve_in_background(FAST)
    assert "planned" in caplog.text


def test_a_start_that_hangs_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    start = MonitorServer.startup

    async def slow(server: MonitorServer, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.sleep(0.3)
        await start(server, sockets)

    before = set(threading.enumerate())
    monkeypatch.setattr(MonitorServer, "startup", slow)
    monkeypatch.setattr(app, "_START_SECONDS", 0.05)
    with pytest.raises(PeerTimeout, match=r"monitor at http://\S+ did not start in 0.05 s"):
        serve_in_background(FAST)
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_stop_that_hangs_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = serve_in_background(FAST)
    with monkeypatch.context() as patch:
        patch.setattr(app, "_STOP_SECONDS", 0.0)
        with pytest.raises(PeerTimeout, match=r"monitor at http://\S+ did not stop in 0 s"):
            handle.close()
    handle.close()


def test_a_host_that_is_not_here_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        serve_in_background(MonitorConfig(host="192.0.2.1", access=ACCESS))


@pytest.mark.parametrize(
    ("host", "prefix"),
    [
        ("127.0.0.2", "http://127.0.0.2:"),
        ("0.0.0.0", "http://127.0.0.1:"),
        ("::1", "http://[::1]:"),
    ],
)
def test_the_url_is_one_that_can_be_called(host: str, prefix: str) -> None:
    if host == "::1":
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    with serve_in_background(MonitorConfig(host=host, access=ACCESS)) as handle:
        assert handle.url.startswith(prefix)
        assert httpx.get(handle.url + "/healthz", trust_env=False, verify=False).status_code == 200


def test_the_defaults_are_what_members_are_asked_for() -> None:
    config = MonitorConfig(heartbeat=timedelta(seconds=2), lease=timedelta(seconds=7))
    with serve_in_background(config) as handle:
        joined = httpx.post(handle.url + "/join", json=SERVER, trust_env=False, verify=False).json()
    assert (joined["heartbeat"], joined["lease"]) == (2, 7)
