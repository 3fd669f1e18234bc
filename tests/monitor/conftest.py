from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.monitor.planned import FAST
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
def http(monitor: MonitorHandle) -> Iterator[httpx.Client]:
    """A client of that monitor."""
    with httpx.Client(base_url=monitor.url, trust_env=False, verify=False, timeout=5) as client:
        yield client
