"""A server's control endpoint over TCP: what it announces, who is told what, and how a pair ends.

The windows lie in this process; the control calls are those of two hosts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from tests.certificates import make_certificate
from tests.comm.numbered_windows import ANY_PORT, NumberedWindows
from tests.monitor.planned import wait_until
from tests.served import LAYERS, D, E, K, batch, oracle, pool
from torch_eaas.access import OPEN, Access
from torch_eaas.client import Client
from torch_eaas.comm.socket_transport import SocketTransport
from torch_eaas.config import ClientConfig, MonitorConfig, ServerConfig
from torch_eaas.errors import AccessDenied, ConfigError, ExpertUnavailable
from torch_eaas.monitor.announcement import ModelInfo
from torch_eaas.monitor.app import serve_in_background
from torch_eaas.monitor.link import fetch_placement
from torch_eaas.server import ExpertServer

TOKEN = "sesame-0123456789"
MODEL = ModelInfo(fingerprint="made-up", layers=LAYERS, num_experts=E)
PATIENT = timedelta(seconds=30)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Access:
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"), "server")
    return Access(token=TOKEN, tls_certificate=certificate, tls_key=key, tls_authority=certificate)


@pytest.fixture
def transport() -> SocketTransport:
    return SocketTransport(NumberedWindows())


@pytest.fixture(params=["plain", "TLS"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Access, Access]]:
    """What a server is given, and its clients."""
    if request.param == "plain":
        yield Access(token=TOKEN), Access(token=TOKEN)
        return
    access: Access = request.getfixturevalue("certified")
    yield access, Access(token=TOKEN, tls_authority=access.tls_authority)


def ask(client: Client, seed: int = 0) -> None:
    x, ids, w = batch(5, seed)
    got = client.combine(client.dispatch(LAYERS[0], x, ids, w, num_experts=E))
    expected = oracle(LAYERS[0], x, ids, w)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_client_finds_a_server_of_another_host_by_the_monitor(
    ends: tuple[Access, Access], transport: SocketTransport
) -> None:
    own, theirs = ends
    config = ServerConfig(name="s", address=ANY_PORT, access=own)
    asks = ClientConfig(hidden_size=D, top_k=K, access=theirs)
    with (
        serve_in_background(MonitorConfig(access=own)) as monitor,
        ExpertServer(
            pool(), config, transport=transport, monitor=monitor.url, model=MODEL
        ).serve_in_background() as server,
        Client(asks, monitor=monitor.url, transport=transport) as client,
    ):
        client.wait_ready(LAYERS, E, PATIENT)
        ask(client)
        [info] = fetch_placement(monitor.url, access=theirs).servers
        # as it was given, but for the port
        assert info.address == server.address
        assert server.address.startswith(ANY_PORT.removesuffix("0").replace("tcp", _scheme(own)))
        # kept open for calls that come at any time
        assert server.num_clients == 1


def _scheme(access: Access) -> str:
    return "tcp" if access.tls_certificate is None else "tls"


def test_every_control_call_goes_over_it_for_those_with_the_token(
    ends: tuple[Access, Access], transport: SocketTransport
) -> None:
    own, theirs = ends
    config = ServerConfig(name="s", address=ANY_PORT, access=own)
    with ExpertServer(pool(), config, transport=transport).serve_in_background() as server:
        stranger = Access(token="another-0123456789", tls_authority=theirs.tls_authority)
        link = transport.dial(server.address, 5, stranger)
        for verb in ("handshake", "close", "describe", "health", "metrics", "placement", "drain"):
            with pytest.raises(AccessDenied, match="token is missing or wrong"):
                link.call(verb, {}, timeout=5)
        link.close()
        link = transport.dial(server.address, 5, theirs)
        assert link.call("health", {}, timeout=5)[0]["state"] == "serving"
        assert link.call("describe", {}, timeout=5)[0]["name"] == "s"
        assert "server_access_denied_total 7.0" in link.call("metrics", {}, timeout=5)[0]["text"]
        assert link.call("placement", {}, timeout=5)[0]["placement"]["servers"] == []
        assert link.call("close", {"instance": "7", "epoch": 1}, timeout=5)[0]["closed"] == 1
        assert json.dumps(link.call("drain", {}, timeout=5)[0]).count("draining") == 1
        # it drains, and its end is told
        wait_until(lambda: link.closed)
        link.close()


def test_a_pair_whose_connection_is_cut_opens_anew(
    ends: tuple[Access, Access], transport: SocketTransport
) -> None:
    own, theirs = ends
    config = ServerConfig(name="s", address=ANY_PORT, access=own)
    asks = ClientConfig(hidden_size=D, top_k=K, access=theirs)
    with (
        ExpertServer(pool(), config, transport=transport).serve_in_background() as server,
        Client(asks, servers=[server.address], transport=transport) as client,
    ):
        client.wait_ready(LAYERS, E, PATIENT)
        ask(client)
        before = client._connections.live["s"]
        # as a middlebox does that has forgotten it
        [connection] = server._listener._connections.values()  # type: ignore[attr-defined]
        connection.shutdown(2)
        wait_until(lambda: client._connections.live.get("s", before).epoch > before.epoch)
        ask(client, 1)
        assert server.num_clients == 1


def test_a_client_without_the_authority_tells_no_token_and_says_why(
    certified: Access, transport: SocketTransport
) -> None:
    config = ServerConfig(name="s", address=ANY_PORT, access=certified)
    with ExpertServer(pool(), config, transport=transport).serve_in_background() as server:
        asks = ClientConfig(hidden_size=D, top_k=K, access=Access(token=TOKEN))
        with (
            Client(asks, servers=[server.address], transport=transport) as client,
            pytest.raises(ExpertUnavailable, match=r"told no token: .*verify failed.*--tls-auth"),
        ):
            client.wait_ready(LAYERS, E, timedelta(milliseconds=50))
        assert server._control.denied == 0


def test_a_server_for_other_machines_asks_for_a_token_before_it_starts(
    transport: SocketTransport,
) -> None:
    config = ServerConfig(name="s", address="tcp://192.0.2.1:7000", access=OPEN)
    with pytest.raises(ConfigError, match=r"which other machines reach, without a token: give one"):
        ExpertServer(pool(), config, transport=transport)
