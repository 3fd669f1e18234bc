from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.monitor.planned import client, server, wait_until
from torch_eaas.monitor.app import MonitorHandle
from torch_eaas.monitor.schemas import MAX_BODY_BYTES
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
    assert (joined["heartbeat"], joined["lease"]) == (0.5, 5.0)
    beaten = http.post("/heartbeat", json={"instance": LIFE, "state": "draining"}).json()
    assert beaten == {
        "status": "ok",
        "monitor": joined["monitor"],
        "term": 1,
        "version": 2,
        "load": {},
        "pending": 0,
        "silent": [],
    }
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
    assert min(times) < 0.03, "without TCP_NODELAY each answer takes 40 ms"


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


def test_a_lease_that_expires_is_counted_and_the_server_is_down(monitor: MonitorHandle) -> None:
    with httpx.Client(base_url=monitor.url, trust_env=False, verify=False) as http:
        http.post("/join", json=SERVER)
        wait_until(lambda: http.get("/members").json()["suspects"])
        metrics = metrics_of(http)
    assert metrics["torch_eaas_server_up", "s1"] == 0
    assert metrics["torch_eaas_leases_expired_total",] == 1
    assert metrics["torch_eaas_members", "server"] == 0


def test_a_heartbeats_answer_says_what_to_load_and_whether_to_wait(http: httpx.Client) -> None:
    other = {"name": "s2", "instance": "0" * 15 + "2", "holdings": {}, "room": 6}
    http.post("/join", json={**SERVER, "holdings": {"1": [0, 2], "2": [1]}})
    http.post("/join", json={**SERVER, **other})
    drained = http.post("/heartbeat", json={"instance": LIFE, "state": "draining"}).json()
    assert (drained["load"], drained["pending"]) == ({}, 3)
    asked = http.post("/heartbeat", json={"instance": other["instance"], "room": 6}).json()
    assert (asked["load"], asked["pending"]) == ({"1": [0, 2], "2": [1]}, 0)
    shown = http.get("/members").json()["servers"]
    assert [(s["name"], s["room"], s["stuck"]) for s in shown] == [
        ("s1", 0, False),
        ("s2", 6, False),
    ]
    assert metrics_of(http)["torch_eaas_server_stuck", "s1"] == 0
