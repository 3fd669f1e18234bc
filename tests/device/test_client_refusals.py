"""What a client on a device refuses: each message names what is wrong and the next step."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.device_served import (
    D,
    E,
    World,
    call,
    device_config,
    every_expert,
    inputs,
    moe_sum,
    world,
)
from tests.ops.processes import needs_x86
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.device import client_book as device_client_book
from torch_eaas.device.client import DeviceClient
from torch_eaas.errors import ConfigError, ExpertUnavailable

pytestmark = needs_x86

EVERY = every_expert(1)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def served() -> Iterator[World]:
    with world(EVERY) as servers:
        servers.client()
        yield servers


def bad(what: str, *, tokens: int = 2) -> dict[str, Any]:
    x_TD, ids_TK, weights_TK = inputs(tokens)
    good = {"x_TD": x_TD, "ids_TK": ids_TK, "weights_TK": weights_TK, "num_experts": E}
    changes: dict[str, dict[str, Any]] = {
        "width": {"x_TD": torch.zeros(2, D + 1)},
        "dtype": {"x_TD": x_TD.double()},
        "ids": {"ids_TK": ids_TK[:, :1]},
        "ids' dtype": {"ids_TK": ids_TK.float()},
        "experts": {"num_experts": E + 1},
        "device": {"x_TD": x_TD.to("meta")},
        "tokens": {},
    }
    return good | changes[what]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (bad("width"), "layer 0: hidden states must be (T, 8) in fp32, bf16 or fp16, got (2, 9)"),
        (bad("dtype"), "hidden states must be (T, 8) in fp32, bf16 or fp16, got (2, 8) in torch.f"),
        (bad("ids"), "layer 0: expert ids and weights must be (2, 2), got (2, 1) and (2, 2)"),
        (bad("ids' dtype"), "layer 0: expert ids must be int32 or int64, got torch.float32; cast"),
        (
            bad("tokens", tokens=5),
            "layer 0: 5 tokens at once are more than max_tokens 4, and the device path splits no "
            "batch; raise max_tokens here and at the servers, or run fewer at once: with "
            "transformers, a prompt in parts by generate(prefill_chunk_size=...)",
        ),
        (bad("experts"), "layer 0 has 4 experts in this client's tables, got num_experts 5;"),
        (
            bad("device"),
            "layer 0: hidden states must be on the client's device cpu, got meta",
        ),
    ],
    ids=["width", "dtype", "ids", "ids' dtype", "tokens", "experts", "device"],
)
def test_what_does_not_fit_is_refused(served: World, given: dict[str, Any], message: str) -> None:
    [client] = served.clients
    call(client, *inputs())
    with pytest.raises(ConfigError, match=re.escape(message)):
        client.dispatch(0, **given)
    # and nothing is left under way
    assert torch.equal(call(client, *inputs()), moe_sum(*inputs()))


def test_a_second_dispatch_in_a_micro_batch_is_refused_and_so_is_a_micro_batch_too_many(
    served: World,
) -> None:
    [client] = served.clients
    ticket = client.dispatch(0, *inputs(), num_experts=E)
    with pytest.raises(
        ConfigError,
        match=r"micro-batch 0 has layer 0's dispatch under way; combine it first, or dispatch "
        r"within client.micro_batch\(i\) of another one",
    ):
        client.dispatch(0, *inputs(), num_experts=E)
    # one that is dropped is given up
    del ticket
    assert torch.equal(call(client, *inputs()), moe_sum(*inputs()))
    with (
        pytest.raises(
            ConfigError, match=r"micro_batch must be 0 to 2, got 3; raise max_micro_batches"
        ),
        client.micro_batch(3),
    ):
        pass


def test_what_cannot_be_captured_says_so(served: World, monkeypatch: pytest.MonkeyPatch) -> None:
    [client] = served.clients
    call(client, *inputs())
    monkeypatch.setattr(device_client_book, "_is_capturing", lambda device: True)
    with pytest.raises(
        ConfigError, match=r"layer 0: an eager dispatch waits for the device, which no capture"
    ):
        client.dispatch(0, *inputs(), num_experts=E)
    client.begin_step()
    try:
        with pytest.raises(
            ConfigError, match=r"layer 7 has no table yet.*; run the step once before it is capt"
        ):
            client.dispatch(7, *inputs(), num_experts=E)
    finally:
        client.end_step()


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"on_missing": "drop"}, {}, "on_missing='drop' is not on the device path: a graph cannot"),
        ({"detect_anomalies": True}, {}, "detect_anomalies is not on the device path: it reads"),
        ({}, {"device": "meta"}, "device must be cpu or cuda, got 'meta'"),
        ({}, {"max_servers": 0}, "max_servers must be an integer of at least 1, got 0"),
        ({}, {"max_replicas": 0}, "max_replicas must be an integer of at least 1, got 0"),
        ({}, {"servers": []}, "a client takes either servers=[address, ...] or monitor=url"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_the_device_path_does_not_have_are_refused(
    options: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        DeviceClient(device_config(**options), **{"servers": ["unix:@nobody"], **more})


def test_a_closed_client_says_so() -> None:
    client = DeviceClient(
        device_config(), servers=["loopback:nobody"], transport=LoopbackTransport()
    )
    client.close()
    client.close()
    with pytest.raises(ConfigError, match=r"client client is closed; open one for this layer"):
        client.dispatch(0, *inputs(), num_experts=E)


def test_a_client_that_waits_to_be_ready_names_what_is_missing() -> None:
    with world(EVERY[:3]) as servers:
        client = servers.client()
        started = time.monotonic()
        with pytest.raises(ExpertUnavailable, match=r"layer 0, expert 3 is unavailable"):
            client.wait_ready([0], E, timeout=timedelta(milliseconds=50))
        assert time.monotonic() - started < 10
        client.wait_ready([0], 3)
