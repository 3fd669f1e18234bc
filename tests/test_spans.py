"""Spans and marks, recorded only while a profiler runs."""

from __future__ import annotations

import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.served import batch, call, served
from torch_eaas.dbo import DoubleBatchOverlap
from torch_eaas.spans import experts_span, is_profiling, span


def names(prof: profile) -> set[str]:
    return {event.name for event in prof.events() if event.name.startswith("eaas::")}


def test_every_micro_batch_layer_and_server_has_its_spans_and_every_request_its_marks() -> None:
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with served(2) as cluster, torch.no_grad():
        client = cluster.client()
        call(client, 1, *batch(4))
        before = client.counters()["requests"]
        with profile(
            activities=[ProfilerActivity.CPU], experimental_config=everything, acc_events=True
        ) as prof:
            DoubleBatchOverlap(client).map(lambda seed: call(client, 3, *batch(4, seed)), [1, 2])
        requests = client.counters()["requests"] - before
    found = names(prof)
    for index in (0, 1):
        assert {f"eaas::{what}/L3/mb{index}" for what in ("dispatch", "wait", "sum")} <= found
    assert "eaas::experts/L3" in found
    marks = [re.fullmatch(r"eaas::(\w+)/(s[01]/[0-9a-f]{16}\.\d+\.\d+\.\d+)", n) for n in found]
    by_kind: dict[str, set[str]] = {}
    for match in filter(None, marks):
        by_kind.setdefault(match[1], set()).add(match[2])
    assert set(by_kind) == {"send", "take", "reply", "read"}
    assert all(ids == by_kind["send"] for ids in by_kind.values())
    assert len(by_kind["send"]) == requests


def test_without_a_profiler_nothing_is_made() -> None:
    assert not is_profiling()
    assert span("wait", 1, 0) is span("sum", 2, 1) is experts_span({3})


@pytest.mark.parametrize("layers", [{3}, {3, 1}], ids=str)
def test_a_batch_of_several_layers_names_them_all(layers: set[int]) -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof, experts_span(layers):
        assert is_profiling()
    assert names(prof) == {f"eaas::experts/L{'+'.join(str(layer) for layer in sorted(layers))}"}
