"""Whatever is sent to the monitor, it answers in JSON below 500 and goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.json_values import almost
from tests.monitor.planned import server
from torch_eaas.config import MonitorConfig
from torch_eaas.monitor.app import create_app
from torch_eaas.monitor.members import Members

JOIN: dict[str, Any] = {
    **server("s1", 0xA1).to_json(),
    "known": {"term": 1, "version": 2, "monitor": "0" * 16},
    "takeover": True,
    "counters": {"requests": 1.5},
}
BEAT: dict[str, Any] = {
    key: JOIN[key] for key in ("instance", "state", "progress", "counters", "known", "holdings")
}
BODIES = {"/join": JOIN, "/heartbeat": BEAT, "/leave": {"instance": "0" * 14 + "a1"}}
VIEWS = ("/", "/members", "/placement", "/metrics", "/readyz", "/healthz")

BODY = st.sampled_from(sorted(BODIES)).flatmap(
    lambda path: st.tuples(st.just(path), almost(BODIES[path]))
)


async def ask(calls: list[tuple[str, bytes]]) -> list[int]:
    """Send each body to a monitor, then look at all that it shows; return the statuses."""
    app = create_app(Members(MonitorConfig(), 1, 0.0), lambda: 100.0)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://monitor") as http:
        statuses = []
        for path, content in calls:
            kind = {"Content-Type": "application/json"}
            answer = await http.post(path, content=content, headers=kind)
            assert isinstance(answer.json(), dict)
            statuses.append(answer.status_code)
        for path in VIEWS:
            seen = await http.get(path)
            assert seen.status_code == 200 or (path, seen.status_code) == ("/readyz", 503)
        return statuses


@settings(max_examples=80)
@given(calls=st.lists(BODY, min_size=1, max_size=3))
def test_no_body_breaks_the_monitor(calls: list[tuple[str, Any]]) -> None:
    sent = [(path, json.dumps(body).encode()) for path, body in calls]
    assert all(status in (200, 400, 409, 422) for status in asyncio.run(ask(sent)))


@settings(max_examples=40)
@given(path=st.sampled_from(sorted(BODIES)), content=st.binary(max_size=200))
def test_no_bytes_break_the_monitor(path: str, content: bytes) -> None:
    assert asyncio.run(ask([(path, content)]))[0] in (200, 400, 422)
