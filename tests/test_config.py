"""Every value that a config refuses, and the words it refuses it with."""

from __future__ import annotations

import dataclasses
import inspect
from datetime import timedelta
from typing import Any

import pytest

from torch_eaas import config as config_module
from torch_eaas.config import ClientConfig, MonitorConfig, ServerConfig
from torch_eaas.errors import ConfigError

CLIENT = {"hidden_size": 64, "top_k": 2}
ZERO = timedelta(0)
SECOND = timedelta(seconds=1)
CONFIGS = pytest.mark.parametrize("config", [ClientConfig, ServerConfig, MonitorConfig])


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        *(
            (ClientConfig, {name: bad}, f"{name} must be an integer of at least 1, got {bad!r}")
            for name in ("hidden_size", "top_k", "max_tokens", "max_micro_batches")
            for bad in (0, 1.5)
        ),
        (ClientConfig, {"wire_dtype": "fp4"}, "wire_dtype must be one of fp32, bf16, fp16, fp8"),
        (ClientConfig, {"reply_dtype": "fp16"}, "reply_dtype must be one of fp32, bf16, got"),
        (ClientConfig, {"combine": "sum"}, "combine must be one of partial, exact, got 'sum'"),
        *(
            (ClientConfig, {name: bad}, f"{name} must be a timedelta above zero, got")
            for name in (
                "request_timeout",
                "first_request_timeout",
                "hedge_after",
                "recovery_timeout",
            )
            for bad in (ZERO, -SECOND, 1)
        ),
        (ServerConfig, {"name": ""}, "name must not be empty"),
        (ServerConfig, {"max_rows": 0}, "max_rows must be an integer of at least 1, got 0"),
        (ServerConfig, {"max_pairs": 0}, "max_pairs must be an integer of at least 1, got 0"),
        (ServerConfig, {"drain_timeout": ZERO}, "drain_timeout must be a timedelta above zero"),
        (MonitorConfig, {"host": ""}, r"host must not be empty; 0\.0\.0\.0 binds every interface"),
        (MonitorConfig, {"port": -1}, "port must be an integer of at least 0, got -1"),
        (MonitorConfig, {"port": 65536}, "port must be 0 to 65535, got 65536"),
        (MonitorConfig, {"lease": ZERO}, "lease must be a timedelta above zero, got"),
        (MonitorConfig, {"heartbeat": 0.5}, "heartbeat must be a timedelta above zero, got 0.5"),
        (
            MonitorConfig,
            {"lease": 2.9 * SECOND, "heartbeat": SECOND},
            "lease must be at least three heartbeats, got lease 0:00:02.9.* and heartbeat 0:00:01",
        ),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_refused(
    config: type, changes: dict[str, Any], message: str
) -> None:
    required = CLIENT if config is ClientConfig else {}
    with pytest.raises(ConfigError, match=message):
        config(**{**required, **changes})


def test_defaults_are_those_of_the_design() -> None:
    client = ClientConfig(**CLIENT)
    assert (client.max_tokens, client.max_micro_batches, client.slots) == (128, 3, 4)
    assert client.combine == "partial"
    assert client.request_timeout == SECOND
    assert client.first_request_timeout == 60 * SECOND
    assert client.hedge_after is None
    assert client.recovery_timeout == 30 * SECOND
    server, monitor = ServerConfig(), MonitorConfig()
    assert (server.max_rows, server.drain_timeout) == (2048, 20 * SECOND)
    assert (monitor.heartbeat, monitor.lease) == (SECOND / 2, 5 * SECOND)
    assert monitor.host == "127.0.0.1"


@pytest.mark.parametrize("max_micro_batches", [1, 3, 63])
def test_a_pair_has_one_slot_more_than_micro_batches(max_micro_batches: int) -> None:
    config = ClientConfig(**CLIENT, max_micro_batches=max_micro_batches)
    assert config.slots == max_micro_batches + 1


@CONFIGS
def test_a_config_is_frozen_and_takes_keywords_only(config: Any) -> None:
    made = config(**CLIENT) if config is ClientConfig else config()
    field = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, field, getattr(made, field))
    with pytest.raises(TypeError, match="positional"):
        config(64)


@CONFIGS
def test_each_field_of_a_config_is_documented_below_it(config: type) -> None:
    lines = [line.strip() for line in inspect.getsource(config).splitlines()]
    for field in dataclasses.fields(config):
        [at] = [i for i, line in enumerate(lines) if line.startswith(f"{field.name}: ")]
        assert lines[at + 1].startswith('"""'), field.name


def test_what_a_client_must_say_has_no_default() -> None:
    with pytest.raises(TypeError, match="'hidden_size' and 'top_k'"):
        ClientConfig()  # type: ignore[call-arg]  # on purpose
    assert config_module.LEASE >= 3 * config_module.HEARTBEAT
