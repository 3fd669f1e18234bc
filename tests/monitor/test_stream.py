from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

from tests.monitor.planned import server, wait_until

LIFE = "00000000000000a1"
SERVER: dict[str, Any] = server("s1", 0xA1).to_json()


def read_events(http: httpx.Client, count: int, last_id: str = "") -> list[dict[str, str]]:
    """Return the next events, each with id, event and data."""
    headers = {"Last-Event-ID": last_id} if last_id else {}
    events: list[dict[str, str]] = []
    with http.stream("GET", "/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        for line in answer.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
                continue
            events.append(fields)
            fields = {}
            if len(events) == count:
                break
    return events


def test_events_stream_and_resume_where_a_listener_stopped(http: httpx.Client) -> None:
    http.post("/join", json=SERVER)
    (start,) = read_events(http, 1)
    assert start["event"] == "resync"
    http.post("/heartbeat", json={"instance": LIFE, "state": "draining"})
    http.post("/leave", json={"instance": LIFE})
    change, placed, left, emptied = read_events(http, 4, start["id"])
    kinds = [event["event"] for event in (change, placed, left, emptied)]
    assert kinds == ["change", "placement", "leave", "placement"]
    assert json.loads(emptied["data"])["version"] == 3
    assert read_events(http, 1, left["id"]) == [emptied]
    assert read_events(http, 1, "0123456789abcdef-1")[0]["event"] == "resync"


def test_a_listener_hears_of_a_change_when_it_happens(http: httpx.Client) -> None:
    heard: list[dict[str, str]] = []
    listener = threading.Thread(target=lambda: heard.extend(read_events(http, 3)))
    listener.start()
    wait_until(lambda: heard or listener.is_alive())
    time.sleep(0.1)
    http.post("/join", json=SERVER)
    listener.join(5)
    assert [event["event"] for event in heard] == ["resync", "join", "placement"]
