"""HTTPS between members and monitor, with certificates that are made for the test."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.certificates import make_certificate
from tests.monitor.planned import client, server, wait_until
from torch_eaas.access import Access
from torch_eaas.config import MonitorConfig
from torch_eaas.errors import ConfigError, PeerGone
from torch_eaas.monitor.agent import MonitorAgent, fetch_placement
from torch_eaas.monitor.app import serve_in_background
from torch_eaas.monitor.link import MonitorLink
from torch_eaas.placement import Placement

TOKEN = "sesame-0123456789"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Access:
    """What a monitor and its members are given."""
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"), "monitor")
    return Access(token=TOKEN, tls_certificate=certificate, tls_key=key, tls_authority=certificate)


def test_members_and_monitor_talk_https(own: Access) -> None:
    with serve_in_background(MonitorConfig(access=own)) as handle:
        assert handle.url.startswith("https://127.0.0.1:")
        member = Access(token=TOKEN, tls_authority=own.tls_authority)
        with MonitorAgent(handle.url, lambda: server("s1", 1), lambda _: None, access=member):
            wait_until(lambda: fetch_placement(handle.url, access=member).servers)


def test_events_come_over_https_to_those_with_the_token(own: Access) -> None:
    rare = MonitorConfig(access=own, heartbeat=timedelta(seconds=20), lease=timedelta(seconds=60))
    member = Access(token=TOKEN, tls_authority=own.tls_authority)
    names: list[list[str]] = []

    def take(placement: Placement) -> None:
        names.append([server.name for server in placement.servers])

    with serve_in_background(rare) as handle:
        with MonitorAgent(handle.url, lambda: client("c", 1), take, access=member):
            wait_until(lambda: names)
            with MonitorLink(handle.url, timedelta(seconds=5), member) as link:
                link.call("POST", "/join", server("s1", 2).to_json())
            # a tenth of a heartbeat
            wait_until(lambda: names[-1] == ["s1"], 2.0)
            began = time.monotonic()
        # the thread that waits for the next event has been hung up on
        assert time.monotonic() - began < 0.5
        assert "eaas-events" not in {thread.name for thread in threading.enumerate()}


def test_a_monitor_with_another_certificate_is_not_told_the_token(
    own: Access, tmp_path: Path
) -> None:
    other, _ = make_certificate(tmp_path, "other")
    with serve_in_background(MonitorConfig(access=own)) as handle:
        for authority in (None, other):
            with pytest.raises(PeerGone, match=r"verify failed.*; --tls-authority names what"):
                fetch_placement(handle.url, access=Access(token=TOKEN, tls_authority=authority))
        with pytest.raises(PeerGone, match=r"GET /placement: "):
            fetch_placement(handle.url.replace("https", "http"), access=Access(token=TOKEN))


def test_an_authority_without_https_is_refused_before_the_token_is_sent(own: Access) -> None:
    with pytest.raises(ConfigError, match=r"monitor http://\S+: is no https.*give the https URL"):
        fetch_placement("http://127.0.0.1:1", access=own)


@pytest.mark.parametrize("content", [None, b"", b"no certificate"], ids=ascii)
def test_an_authority_that_is_none_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "authority.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"certificates of {path}: .*is a PEM file"):
        fetch_placement("https://127.0.0.1:1", access=Access(tls_authority=path))


def test_certificates_that_cannot_be_used_end_the_start(own: Access, tmp_path: Path) -> None:
    _, other_key = make_certificate(tmp_path, "other")
    locked, locked_key = make_certificate(tmp_path, "locked", "-passout", "pass:secret")
    (tmp_path / "empty").touch()
    for certificate, key in (
        (tmp_path / "missing", own.tls_key),
        (own.tls_certificate, tmp_path / "empty"),
        (own.tls_certificate, other_key),
        (locked, locked_key),
    ):
        access = Access(tls_certificate=certificate, tls_key=key)
        with pytest.raises(ConfigError, match=f"cannot use certificate {certificate} with key"):
            serve_in_background(MonitorConfig(access=access))
