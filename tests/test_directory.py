"""Where a client learns of servers: the monitor, and the servers themselves while it is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.ops.processes import needs_x86
from tests.served import LAYERS, WEIGHTS, D, E, K, batch, call, oracle, pool
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.config import ClientConfig, MonitorConfig, ServerConfig
from torch_eaas.device.client import DeviceClient
from torch_eaas.errors import ConfigError
from torch_eaas.monitor.announcement import ModelInfo
from torch_eaas.monitor.app import serve_in_background
from torch_eaas.placement import share
from torch_eaas.server import ExpertServer

MODEL = ModelInfo(fingerprint="abcd:fp32", layers=LAYERS, num_experts=E)


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, f"not within 10 s: {what}"
        time.sleep(0.02)


def server(i: int, url: str, transport: LoopbackTransport, count: int = 2) -> ExpertServer:
    held = share(LAYERS, E, i, count, copies=count)
    experts = pool([(layer, e) for layer, ids in held.items() for e in ids])
    config = ServerConfig(name=f"s{i}", fingerprint=MODEL.fingerprint)
    return ExpertServer(
        experts, config, transport=transport, monitor=url, model=MODEL
    ).serve_in_background()


def test_a_client_follows_the_monitor_and_serves_on_when_it_dies() -> None:
    transport = LoopbackTransport()
    with serve_in_background(MonitorConfig()) as monitor:
        client = Client(
            ClientConfig(hidden_size=D, top_k=K), monitor=monitor.url, transport=transport
        )
        first = server(0, monitor.url, transport)
        client.wait_ready(LAYERS, E)
        second = server(1, monitor.url, transport)
        until(lambda: len(client._connections.live) == 2, "both servers connected")
        until(lambda: first._control.placement.version > 1, "the server knows the placement")
        order = client.placement.order
    x, ids, w = batch(9)
    out = call(client, 1, x, ids, w)
    torch.testing.assert_close(out.double(), oracle(1, x, ids, w), rtol=1e-5, atol=1e-5)
    assert client.placement.order == order
    second.close()
    out = call(client, 3, x, ids, w)
    torch.testing.assert_close(out.double(), oracle(3, x, ids, w), rtol=1e-5, atol=1e-5)
    client.close()
    first.close()


def test_while_the_monitor_is_away_a_server_hands_out_the_newest_placement_it_knows() -> None:
    transport = LoopbackTransport()
    with serve_in_background(MonitorConfig()) as monitor:
        client = Client(
            ClientConfig(hidden_size=D, top_k=K),
            monitor=monitor.url,
            transport=transport,
            background=False,
        )
        first = server(0, monitor.url, transport)
        until(lambda: (client._directory.refresh(), len(client.placement.servers))[1] == 1, "s0")
        client.maintain()
        client._directory._agent.close()  # type: ignore[union-attr]  # it hears nothing more
        second = server(1, monitor.url, transport)
        until(lambda: len(first._control.placement.servers) == 2, "s0 knows s1")
        assert len(client.placement.servers) == 1
    offered = []
    agent = client._directory._agent
    agent.offer = offered.append  # type: ignore[union-attr,method-assign,assignment]
    client._connections.placement_is_stale = True
    client.maintain()
    assert [s.name for s in offered[0].servers] == ["s0", "s1"]
    client.close()
    first.close()
    second.close()


def test_servers_named_by_address_need_names_of_their_own() -> None:
    transport = LoopbackTransport()
    servers = [ExpertServer(pool(), transport=transport) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"a name of its own, got \['server', 'server'\]"):
        Client(
            ClientConfig(hidden_size=D, top_k=K),
            servers=[s.address for s in servers],
            transport=transport,
        )


def test_a_server_that_was_away_at_the_start_is_found_later() -> None:
    transport = LoopbackTransport()
    client = Client(
        ClientConfig(hidden_size=D, top_k=K), servers=["loopback:late"], transport=transport
    )
    made = ExpertServer(pool(), ServerConfig(address="loopback:late"), transport=transport)
    with made.serve_in_background():
        client.wait_ready(LAYERS, E)
        x, ids, w = batch(3)
        out = call(client, 1, x, ids, w)
        torch.testing.assert_close(out.double(), oracle(1, x, ids, w), rtol=1e-5, atol=1e-5)
        client.close()


def host_client(config: ClientConfig, address: str) -> Client:
    return Client(config, servers=[address])


def device_client(config: ClientConfig, address: str) -> DeviceClient:
    return DeviceClient(config, servers=[address])


@needs_x86
@pytest.mark.parametrize("make", [host_client, device_client])
def test_without_a_monitor_experts_that_a_server_is_given_later_are_found_by_who_waits_for_them(
    make: Callable[[ClientConfig, str], Client | DeviceClient],
) -> None:
    experts = pool([(1, e) for e in range(E - 1)])
    config = ClientConfig(hidden_size=D, top_k=K, max_tokens=9)
    with (
        ExpertServer(experts).serve_in_background() as running,
        make(config, running.address) as client,
    ):
        client.wait_ready([1], E - 1)
        later = threading.Timer(0.3, experts.add, (1, E - 1, WEIGHTS[1, E - 1]))
        later.start()
        x, ids, w = batch(9)
        ids[0, 0] = E - 1
        out = client.combine(client.dispatch(1, x, ids, w, num_experts=E))
        later.join()
    torch.testing.assert_close(out.double(), oracle(1, x, ids, w), rtol=1e-5, atol=1e-5)
