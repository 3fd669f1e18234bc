from __future__ import annotations

from typing import Any

import pytest

from tests.monitor.planned import MODEL, client, server
from torch_eaas.errors import ConfigError
from torch_eaas.monitor.announcement import MAX_COUNTERS, ModelInfo, clean_counters
from torch_eaas.monitor.schemas import JoinBody
from torch_eaas.placement import Holdings


@pytest.mark.parametrize(
    "said",
    [
        server("s1", (1 << 64) - 1, {1: (0, 2), 2: ()}, state="draining", progress=5),
        server("s2", 1, {}, model=None, counters={"requests": 1.5}),
        client("c", 7),
    ],
    ids=lambda said: said.name,
)
def test_what_is_announced_arrives(said: Any) -> None:
    assert JoinBody.model_validate(said.to_json()).value() == said


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": ""}, "name must not be empty"),
        ({"instance": 0}, "instance must be a 64-bit id above 0, got 0"),
        ({"instance": 1 << 64}, "64-bit id"),
        ({"address": ""}, "server s1 must announce the address of its endpoint"),
        ({"state": "asleep"}, "state must be one of serving, draining, got 'asleep'"),
    ],
    ids=str,
)
def test_a_bad_announcement_is_refused_where_it_is_made(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        server(**{"name": "s1", "instance": 1, **change})


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 1), (-1, 0)], ids=str)
def test_layers_must_ascend(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="layers must be ascending and not negative"):
        ModelInfo(fingerprint="x", layers=layers, num_experts=1)


def test_a_model_has_experts() -> None:
    with pytest.raises(ConfigError, match="num_experts must be an integer of at least 1, got 0"):
        ModelInfo(fingerprint="x", layers=(1,), num_experts=0)


@pytest.mark.parametrize(
    ("holdings", "stranger"),
    [
        ({}, None),
        ({1: (0, 1, 2), 2: ()}, None),
        ({9: ()}, None),
        ({9: (1,)}, (9, 1)),
        ({1: (0, 3)}, (1, 3)),
    ],
    ids=str,
)
def test_a_stranger_is_an_expert_that_the_model_does_not_have(
    holdings: Holdings, stranger: tuple[int, int] | None
) -> None:
    assert MODEL.stranger_in(holdings) == stranger


@pytest.mark.parametrize(
    ("counters", "kept"),
    [
        ({}, {}),
        ({"requests": 3, "a_1": -0.5}, {"requests": 3.0, "a_1": -0.5}),
        ({"": 1, "A": 1, "1a": 1, "a-b": 1, "a\n": 1, "x" * 64: 1}, {}),
        ({"nan": float("nan"), "inf": float("-inf"), "ok": 0}, {"ok": 0.0}),
    ],
    ids=["none", "good", "names", "values"],
)
def test_only_counters_that_can_be_shown_are_sent(
    counters: dict[str, float], kept: dict[str, float]
) -> None:
    assert clean_counters(counters) == kept


def test_the_first_of_too_many_counters_are_sent() -> None:
    counters = {f"c{i}": float(i) for i in range(MAX_COUNTERS + 9)}
    assert list(clean_counters(counters)) == [f"c{i}" for i in range(MAX_COUNTERS)]
