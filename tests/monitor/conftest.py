from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.monitor.party import Party, Start
from tests.monitor.planned import FAST
from torch_eaas.config import MonitorConfig
from torch_eaas.monitor.agent import Announcement
from torch_eaas.monitor.app import MonitorHandle, serve_in_background


@pytest.fixture
def monitor() -> Iterator[MonitorHandle]:
    """A monitor with short leases."""
    with serve_in_background(FAST) as handle:
        yield handle


@pytest.fixture(scope="module")
def calm() -> Iterator[httpx.Client]:
    """A client of a monitor that no member joins, shared by the tests of a file."""
    with (
        serve_in_background(FAST) as handle,
        httpx.Client(base_url=handle.url, trust_env=False, verify=False, timeout=5) as client,
    ):
        yield client


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """A client of a new monitor, whose leases outlast any test."""
    with (
        serve_in_background(MonitorConfig()) as handle,
        httpx.Client(base_url=handle.url, trust_env=False, verify=False, timeout=5) as client,
    ):
        yield client


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts parties and closes their agents."""
    with ExitStack() as stack:

        def new(url: str, said: Announcement) -> Party:
            party = Party(url, said)
            stack.callback(party.agent.close)
            return party

        yield new


@pytest.fixture
def black_hole() -> Iterator[str]:
    """The URL of a socket that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def free_port() -> int:
    """A port that was free a moment ago, for a monitor that comes later."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
