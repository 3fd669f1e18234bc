"""One Perfetto file of a client's and its servers' traces, with the servers' clocks set right.

Each request leaves four marks: the client's *send* and *read*, the server's *take* and *reply*
(``torch_eaas/spans.py``). A request is taken after it was sent and read after it was replied to, so
each one bounds how far the server's clock may be ahead from both sides. The middle of what all
leave open is the offset, and half of it how wrong that may be.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_eaas.errors import ConfigError

Event = dict[str, Any]
Trace = dict[str, Any]

PREFIX = "eaas::"
PIDS_A_FILE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """How far a server's clock is ahead of the client's."""

    requests: int
    """Requests that are in both traces."""

    offset_us: float
    """To be subtracted from the server's times."""

    error_us: float
    """How wrong that may be."""


def read_trace(path: Path) -> Trace:
    """Return a trace as ``torch.profiler`` exports it, ``.json`` or ``.json.gz``.

    Raises:
        ConfigError: It cannot be read, or has no events.
    """
    try:
        raw = path.read_bytes()
        found = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read as a trace: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ConfigError(f"{path}: has no traceEvents; export it with export_chrome_trace")
    return found


def merge_traces(
    client: Trace, servers: Mapping[str, Trace], client_name: str = "client"
) -> tuple[Trace, dict[str, Offset]]:
    """Return all events on the client's clock, and each server's offset by its file's name.

    Raises:
        ConfigError: A server's trace has no request of the client's.
    """
    merged = _placed(client["traceEvents"], 0, client_name)
    sent = _marks(merged)
    offsets: dict[str, Offset] = {}
    for index, (name, trace) in enumerate(servers.items(), 1):
        events = _placed(trace["traceEvents"], index, name)
        # each file counts from a time of its own
        _move(events, _base_us(trace) - _base_us(client))
        offsets[name] = _offset(name, sent, _marks(events))
        _move(events, -offsets[name].offset_us)
        merged += events
        merged += _arrows(sent, _marks(events), index)
    whole = {**{k: v for k, v in client.items() if k != "traceName"}, "traceEvents": merged}
    return whole, offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    place: Event
    begin_us: float
    end_us: float


_Marks = dict[tuple[str, str], _Mark]
"""What happened and to which request, to when and where."""


def _marks(events: Sequence[Event]) -> _Marks:
    marks: _Marks = {}
    for event in events:
        what, slash, request = str(event.get("name", "")).partition("/")
        kind = what.removeprefix(PREFIX)
        if event.get("ph") == "X" and slash and kind in ("send", "take", "reply", "read"):
            begin, end = event["ts"], event["ts"] + event["dur"]
            place = {"pid": event["pid"], "tid": event["tid"]}
            marks[kind, request] = _Mark(place=place, begin_us=begin, end_us=end)
    return marks


def _offset(name: str, sent: _Marks, taken: _Marks) -> Offset:
    least, most = float("-inf"), float("inf")
    common = [request for kind, request in taken if kind == "take" and ("send", request) in sent]
    for request in common:
        # the marks before a word end before it is stored, those after it begin afterwards
        most = min(most, taken["take", request].begin_us - sent["send", request].end_us)
        if ("reply", request) in taken and ("read", request) in sent:
            least = max(least, taken["reply", request].end_us - sent["read", request].begin_us)
    if not common or least == float("-inf"):
        raise ConfigError(
            f"{name}: no request of the client was answered in this trace; record both at the "
            f"same time, and the client's with profile_all_threads"
        )
    # clocks that drift leave nothing open; the middle is then wrong by half of what they miss
    return Offset(
        requests=len(common), offset_us=(least + most) / 2, error_us=abs(most - least) / 2
    )


def _base_us(trace: Trace) -> float:
    return float(trace.get("baseTimeNanoseconds", 0)) / 1000


def _placed(events: Sequence[Event], index: int, name: str) -> list[Event]:
    """Return copies of a file's events, in processes of their own."""
    pids: dict[Any, int] = {}
    placed = []
    for event in events:
        pid = pids.setdefault(event.get("pid"), PIDS_A_FILE * (index + 1) + len(pids))
        copy = {**event, "pid": pid}
        if "id" in event:
            copy["id"] = f"{index}/{event['id']}"
        if event.get("ph") == "M" and event.get("name") == "process_name":
            copy["args"] = {"name": name}
        if event.get("ph") == "M" and event.get("name") == "process_sort_index":
            copy["args"] = {"sort_index": pid}
        placed.append(copy)
    return placed


def _move(events: Sequence[Event], by_us: float) -> None:
    for event in events:
        if "ts" in event:
            event["ts"] += by_us


def _arrows(sent: _Marks, taken: _Marks, index: int) -> Iterator[Event]:
    """Yield an arrow from each send to its take, and from each reply to its read."""
    for number, ((kind, request), there) in enumerate(taken.items()):
        here = sent.get(("send" if kind == "take" else "read", request))
        if here is not None:
            begin, end = (here, there) if kind == "take" else (there, here)
            shared = {"cat": "eaas", "name": "request", "id": f"eaas/{index}/{number}"}
            yield {**shared, **begin.place, "ph": "s", "ts": begin.begin_us}
            yield {**shared, **end.place, "ph": "f", "bp": "e", "ts": end.begin_us}
