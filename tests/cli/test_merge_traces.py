"""Traces of a client and its servers become one, whatever their clocks say."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import SHAKESPEARE, eaas

from torch_eaas.cli.main import main
from torch_eaas.cli.traces import merge_traces, read_trace
from torch_eaas.client import Client
from torch_eaas.config import ClientConfig
from torch_eaas.dbo import DoubleBatchOverlap
from torch_eaas.errors import ConfigError

PID = 7


def event(name: str, begin: float, end: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "pid": PID, "tid": 1, **more}


def traces(ahead_us: float, base_us: float = 0.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a client's and a server's traces of three requests; travel takes 10 to 14 us."""
    here, there = [event("aten::mm", 0, 50, id=3)], []
    for number, (out, back) in enumerate([(14, 10), (10, 12), (12, 14)]):
        at = 1000 * number
        name = f"s0/00ab.1.0.{number}"
        here += [event(f"eaas::send/{name}", at, at + 2)]
        there += [event(f"eaas::take/{name}", at + 2 + out, at + 2 + out)]
        there += [event("eaas::experts/L3", at + 20, at + 400)]
        there += [event(f"eaas::reply/{name}", at + 500, at + 502)]
        here += [event(f"eaas::read/{name}", at + 502 + back, at + 502 + back)]
    for each in there:
        each["ts"] += ahead_us - base_us
    there.append({"ph": "M", "name": "process_name", "pid": PID, "args": {"name": "python"}})
    return (
        {"traceEvents": here, "displayTimeUnit": "ms", "traceName": "c.json"},
        {"traceEvents": there, "baseTimeNanoseconds": 1000 * base_us},
    )


@pytest.mark.parametrize("ahead_us", [0.0, 1e6, -123.0])
@pytest.mark.parametrize("base_us", [0.0, 5e9])
def test_a_servers_clock_is_set_right_to_half_of_the_shortest_travels(
    ahead_us: float, base_us: float
) -> None:
    client, server = traces(ahead_us, base_us)
    merged, offsets = merge_traces(client, {"s0": server})
    # 10 us out and 10 us back are the shortest: the middle is exact here
    offset = offsets["s0"]
    assert (offset.requests, offset.error_us) == (3, pytest.approx(10, abs=1e-3))
    assert offset.offset_us == pytest.approx(ahead_us, abs=1e-3)
    ran = [e["ts"] for e in merged["traceEvents"] if e["name"] == "eaas::experts/L3"]
    assert ran == pytest.approx([20, 1020, 2020], abs=1e-3)
    assert "traceName" not in merged


def test_each_file_has_its_own_processes_and_each_request_two_arrows() -> None:
    client, server = traces(50.0)
    events = merge_traces(client, {"a": server, "b": traces(70.0)[1]}, "mine")[0]["traceEvents"]
    ops = [e for e in events if e["name"] == "aten::mm"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["a", "b"]
    assert ops[0]["pid"] not in names
    assert ops[0]["id"] == "0/3"
    arrows = [e for e in events if e["name"] == "request"]
    begins = {e["id"]: e for e in arrows if e["ph"] == "s"}
    ends = {e["id"]: e for e in arrows if e["ph"] == "f"}
    assert len(begins) == len(ends) == 2 * 2 * 3
    for name, begin in begins.items():
        assert begin["ts"] < ends[name]["ts"]
        assert (begin["pid"] in names) != (ends[name]["pid"] in names)


def test_traces_without_a_common_request_are_refused() -> None:
    client, server = traces(0.0)
    client["traceEvents"] = client["traceEvents"][:1]
    with pytest.raises(ConfigError, match="s0: no request of the client was answered in this"):
        merge_traces(client, {"s0": server})


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ConfigError, match=r"x.json: cannot be read as a trace: .*No such file"):
        read_trace(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"x.json: cannot be read as a trace"):
        read_trace(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"x.json: has no traceEvents; export it with"):
        read_trace(path)


def test_the_verb_reads_writes_and_tells_the_offsets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client, server = traces(250.0)
    (tmp_path / "c.json").write_text(json.dumps(client))
    (tmp_path / "s0.json.gz").write_bytes(gzip.compress(json.dumps(server).encode()))
    out = tmp_path / "all.json"
    arguments = [str(tmp_path / "c.json"), str(tmp_path / "s0.json.gz")]
    assert main(["merge-traces", *arguments, "-o", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"server": "s0", "requests": 3, "offset_us": 250.0, "error_us": 10.0}
    assert len(json.loads(out.read_text())["traceEvents"]) > 10
    assert main(["merge-traces", *arguments, "-o", str(tmp_path / "no" / "x.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["merge-traces", *arguments, arguments[1], "-o", str(out)])
    assert "must have different names, got s0, s0" in capsys.readouterr().err


def test_a_servers_own_trace_shows_what_ran_for_each_micro_batch(tmp_path: Path) -> None:
    trace = tmp_path / "server.json"
    with eaas("server", str(SHAKESPEARE), "--name=s0", f"--trace={trace}") as server:
        ready = server.ready()
        layer = int(next(iter(ready["experts"])))
        config = ClientConfig(hidden_size=144, top_k=4)
        everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with Client(config, servers=[ready["address"]]) as client:
            client.wait_ready([layer], 16)

            def step(seed: int) -> None:
                ids_TK = torch.arange(12).view(3, 4)
                for _ in range(3):
                    ticket = client.dispatch(
                        layer, torch.randn(3, 144), ids_TK, torch.ones(3, 4), num_experts=16
                    )
                    client.combine(ticket)

            cpu = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(
                activities=cpu, experimental_config=everything, acc_events=True
            ) as mine:
                DoubleBatchOverlap(client).map(step, [0, 1])
            mine.export_chrome_trace(str(tmp_path / "client.json"))
        server.send(signal.SIGTERM)
        assert server.end() == 0, server.err
    merged, offsets = merge_traces(read_trace(tmp_path / "client.json"), {"s0": read_trace(trace)})
    assert offsets["s0"].requests == 6
    # one host, one clock
    assert abs(offsets["s0"].offset_us) <= offsets["s0"].error_us + 1000
    names = {e["name"] for e in merged["traceEvents"]}
    for what in ("dispatch", "wait", "sum"):
        assert {f"eaas::{what}/L{layer}/mb0", f"eaas::{what}/L{layer}/mb1"} <= names
    assert f"eaas::experts/L{layer}" in names
