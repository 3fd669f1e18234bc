"""Tokens: what is one, who is admitted, and that none is ever shown."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.conftest import FakeClock
from tests.served import D, E, K, batch, pool
from torch_eaas.access import LOG_PAUSE_S, Access, Gate
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.config import ClientConfig, MonitorConfig, ServerConfig
from torch_eaas.errors import AccessDenied, ConfigError, ExpertUnavailable
from torch_eaas.server import ExpertServer

TOKEN = "sesame-0123456789"
ACCESS = Access(token=TOKEN)


@pytest.mark.parametrize(
    ("token", "admitted"),
    [
        (TOKEN, True),
        ("", False),
        (TOKEN[:-1], False),
        (TOKEN + "0", False),
        (TOKEN.upper(), False),
        ("sesame-012345678\u00e9", False),
        ("sesame-012345678\ud800", False),
        (None, False),
        (True, False),
        (TOKEN.encode(), False),
        ([TOKEN], False),
    ],
    ids=ascii,
)
def test_only_the_token_itself_is_admitted(token: object, admitted: bool) -> None:
    assert ACCESS.admits(token) == admitted


@pytest.mark.parametrize("token", ["", TOKEN, None, 7], ids=ascii)
def test_without_a_token_everybody_is_admitted(token: object) -> None:
    assert Access().admits(token)


@pytest.mark.parametrize(
    "token", ["short", "x" * 257, "sesame 0123456789", "s\u00e9same-012345678"]
)
def test_what_is_no_token_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError, match=f"16 to 256 .* has {len(token)} characters") as caught:
        Access(token=token)
    assert token not in str(caught.value)


def test_a_certificate_without_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"go together, got /x\.pem and None"):
        Access(tls_certificate=Path("/x.pem"))


@pytest.mark.parametrize(
    "config",
    [
        ClientConfig(hidden_size=D, top_k=K, access=ACCESS),
        ServerConfig(access=ACCESS),
        MonitorConfig(access=ACCESS),
        ACCESS,
    ],
    ids=lambda config: type(config).__name__,
)
def test_no_repr_shows_the_token(config: object) -> None:
    assert "sesame" not in repr(config) + str(config)


def test_who_is_turned_away_is_counted_and_logged_now_and_then(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(ACCESS, "the monitor", clock)
    assert gate.admits(TOKEN, "anne")
    assert not gate.admits("wrong-9876543210", "bob")
    assert not gate.admits(None, "carl")
    clock.advance(LOG_PAUSE_S)
    assert not gate.admits(None, "dora")
    assert gate.denied == 3
    assert [record.getMessage() for record in caplog.records] == [
        "the monitor turned away bob: token missing or wrong; 1 calls so far",
        "the monitor turned away dora: token missing or wrong; 3 calls so far",
    ]


VERBS = ("handshake", "close", "describe", "health", "metrics", "placement", "drain", "no verb")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("token", ["", "another-0123456789"], ids=["no token", "another"])
def test_a_server_answers_no_verb_without_its_token(verb: str, token: str) -> None:
    transport = LoopbackTransport()
    server = ExpertServer(pool(), ServerConfig(name="s", access=ACCESS), transport=transport)
    made: list[int] = []
    link = transport.dial(server.address, 1, Access(token=token))
    window = transport.create_window(128)
    transport.create_window = made.append  # type: ignore[method-assign,assignment]  # none is made
    with pytest.raises(AccessDenied, match="token is missing or wrong; give this cluster's by"):
        link.call(verb, {}, [window], timeout=1)
    assert made == []
    assert server._control.state == "serving"
    assert "torch_eaas_server_access_denied_total 1.0" in server._control.metrics()
    link.close()
    server.close()


def test_a_client_with_the_token_is_served_and_one_without_is_told_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    transport = LoopbackTransport()
    config = ServerConfig(name="s", access=ACCESS)
    with ExpertServer(pool(), config, transport=transport).serve_in_background() as server:
        address = [server.address]
        good = ClientConfig(hidden_size=D, top_k=K, access=ACCESS)
        with Client(good, servers=address, transport=transport) as client:
            client.wait_ready([1], E)
            ticket = client.dispatch(1, *batch(3), num_experts=E)
            assert torch.isfinite(client.combine(ticket)).all()
            # as if it had been started again with another token
            server._control._gate = Gate(Access(token="another-0123456789"), "s")
        with (
            Client(good, servers=address, transport=transport, background=False) as client,
            pytest.raises(ExpertUnavailable, match=f"known yet; {address[0]}: the token is"),
        ):
            client.wait_ready([1], E, timedelta(milliseconds=1))
    assert "no access to the server at loopback:server" in caplog.text
    assert "sesame" not in caplog.text
