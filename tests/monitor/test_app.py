from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.monitor.planned import FAST, client, server, wait_until
from torch_eaas.config import MonitorConfig
from torch_eaas.errors import ConfigError, PeerTimeout, TransportError
from torch_eaas.monitor import app
from torch_eaas.monitor.app import serve_in_background
from torch_eaas.monitor.schemas import MAX_BODY_BYTES
from torch_eaas.monitor.service import Service
from torch_eaas.monitor.serving import MonitorServer
from torch_eaas.placement import Placement

LIFE = "00000000000000a1"
SERVER: dict[str, Any] = server("s1", 0xA1).to_json()


def metrics_of(http: httpx.Client) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
    }


def test_a_member_joins_beats_and_leaves(http: httpx.Client) -> None:
    joined = http.post("/join", json=SERVER).json()
    assert (joined["status"], joined["term"], joined["version"]) == ("ok", 1, 1)
    assert (joined["heartbeat"], joined["lease"]) == (0.05, 0.4)
    beaten = http.post("/heartbeat", json={"instance": LIFE, "state": "draining"}).json()
    assert beaten == {"status": "ok", "monitor": joined["monitor"], "term": 1, "version": 2}
    assert http.get("/members").json()["servers"][0]["state"] == "draining"
    assert http.post("/leave", json={"instance": LIFE}).json() == {"left": True}
    assert http.post("/heartbeat", json={"instance": LIFE}).json()["status"] == "unknown"
    assert http.get("/members").json()["servers"] == []


def test_the_placement_is_what_servers_announce(http: httpx.Client) -> None:
    http.post("/join", json=SERVER)
    placement = Placement.from_json(http.get("/placement").json())
    assert placement == Placement((server("s1", 0xA1).server_info(),), 1, 1)


def test_readiness_lists_the_missing_experts_by_layer(http: httpx.Client) -> None:
    answer = http.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "no server has announced a model"
    http.post("/join", json={**SERVER, "holdings": {"1": [0, 2], "2": [1]}})
    answer = http.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["missing"] == {"1": [1], "2": [0, 2]}
    http.post("/join", json=server("s2", 0xA2, {1: (1,), 2: (0, 2)}).to_json())
    answer = http.get("/readyz")
    assert (answer.status_code, answer.json()["missing"]) == (200, {})


def test_liveness_needs_no_members(calm: httpx.Client) -> None:
    assert calm.get("/healthz").json() == {"ok": True}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/join", {}, "role: Field required"),
        ("/join", {**SERVER, "extra": 1}, "extra: Extra inputs are not permitted"),
        ("/join", {**SERVER, "instance": "a1"}, "instance: String should match"),
        ("/join", {**SERVER, "instance": 161}, "instance: Input should be a valid string"),
        ("/join", {**SERVER, "instance": "0" * 16}, "instance must be a 64-bit id above 0"),
        ("/join", {**SERVER, "name": ""}, "name: String should match"),
        ("/join", {**SERVER, "name": "a\nb"}, "name: String should match"),
        ("/join", {**SERVER, "name": "x" * 129}, "name: String should match"),
        ("/join", {**SERVER, "address": ""}, "must announce the address"),
        ("/join", {**SERVER, "role": "king"}, "Input should be 'server' or 'client'"),
        ("/join", {**SERVER, "holdings": {"x": [1]}}, "holdings.x"),
        ("/join", {**SERVER, "holdings": {"1": [-1]}}, "greater than or equal to 0"),
        ("/join", {**SERVER, "holdings": {"1": [3]}}, "layer 1, expert 3"),
        ("/join", {**SERVER, "model": None}, "announces no model"),
        ("/join", {**SERVER, "model": {**SERVER["model"], "layers": [2, 1]}}, "ascending"),
        ("/join", {**SERVER, "known": {"term": -1}}, "greater than or equal to 0"),
        ("/heartbeat", {"instance": LIFE, "counters": {"A b": 1}}, "String should match"),
        ("/heartbeat", {"instance": LIFE, "counters": {"a": "x"}}, "valid number"),
        (
            "/heartbeat",
            {"instance": LIFE, "counters": {f"c{i}": 1 for i in range(65)}},
            "at most 64 items",
        ),
        ("/heartbeat", {"instance": LIFE, "progress": -1}, "greater than or equal to 0"),
        ("/leave", {"instance": "x" * 16}, "String should match"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_body_is_refused_in_words(
    calm: httpx.Client, path: str, body: dict[str, Any], text: str
) -> None:
    answer = calm.post(path, json=body)
    assert 400 <= answer.status_code < 500
    assert list(answer.json()) == ["error"]
    assert text in answer.json()["error"]
    assert calm.get("/members").json()["servers"] == []


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 422),
        (b"[]", 422),
        (b"\xff\xfe", 422),
        (b'{"instance": "00000000000000a1", "counters": {"a": NaN}}', 422),
        (b"[" * 100_000, 400),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
    ids=["cut", "list", "bytes", "nan", "deep", "long"],
)
def test_what_is_no_body_is_refused(calm: httpx.Client, content: bytes, status: int) -> None:
    json_type = {"Content-Type": "application/json"}
    answer = calm.post("/heartbeat", content=content, headers=json_type)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert calm.get("/healthz").status_code == 200


def test_a_server_of_another_model_is_refused_over_http(http: httpx.Client) -> None:
    http.post("/join", json=SERVER)
    other = {**SERVER, "name": "s2", "instance": "0" * 15 + "2"}
    answer = http.post("/join", json={**other, "model": {**SERVER["model"], "fingerprint": "x"}})
    assert answer.status_code == 409
    assert "one cluster serves one model" in answer.json()["error"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/nothing"), ("GET", "/join")])
def test_a_wrong_path_is_an_error_in_json(calm: httpx.Client, method: str, path: str) -> None:
    answer = calm.request(method, path)
    assert answer.status_code in (404, 405)
    assert list(answer.json()) == ["error"]


def test_an_answer_does_not_wait_for_a_delayed_acknowledgement(calm: httpx.Client) -> None:
    times = []
    for _ in range(15):
        began = time.monotonic()
        calm.post("/heartbeat", json={"instance": LIFE})
        times.append(time.monotonic() - began)
    assert sorted(times)[7] < 0.03, "TCP_NODELAY is missing: 40 ms an answer"


def test_the_metrics_count_members_and_pass_their_counters_on(http: httpx.Client) -> None:
    http.post("/join", json={**SERVER, "holdings": {"1": [0, 1]}})
    http.post("/join", json=client('c"1', 0xC1).to_json())
    beat = {"instance": LIFE, "counters": {"requests": 12, "rows": 0.5}}
    http.post("/heartbeat", json=beat)
    metrics = metrics_of(http)
    assert metrics["torch_eaas_members", "server"] == 1
    assert metrics["torch_eaas_members", "client"] == 1
    assert metrics["torch_eaas_server_up", "s1"] == 1
    assert metrics["torch_eaas_experts_missing",] == 4
    assert metrics["torch_eaas_placement_term",] == 1
    assert metrics["torch_eaas_placement_version",] == 1
    assert metrics["torch_eaas_leases_expired_total",] == 0
    assert metrics["torch_eaas_member_requests", "s1"] == 12
    assert metrics["torch_eaas_member_rows", "s1"] == 0.5


def test_a_lease_that_expires_is_counted_and_the_server_is_down(http: httpx.Client) -> None:
    http.post("/join", json=SERVER)
    wait_until(lambda: http.get("/members").json()["suspects"])
    metrics = metrics_of(http)
    assert metrics["torch_eaas_server_up", "s1"] == 0
    assert metrics["torch_eaas_leases_expired_total",] == 1
    assert metrics["torch_eaas_members", "server"] == 0


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
        serve_in_background(MonitorConfig(host="192.0.2.1"))


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
    with serve_in_background(MonitorConfig(host=host)) as handle:
        assert handle.url.startswith(prefix)
        assert httpx.get(handle.url + "/healthz", trust_env=False, verify=False).status_code == 200


def test_the_defaults_are_what_members_are_asked_for() -> None:
    config = MonitorConfig(heartbeat=timedelta(seconds=2), lease=timedelta(seconds=7))
    with serve_in_background(config) as handle:
        joined = httpx.post(handle.url + "/join", json=SERVER, trust_env=False, verify=False).json()
    assert (joined["heartbeat"], joined["lease"]) == (2, 7)
