"""A join that fails half-way leaves nothing behind, and the next one works."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path

import pytest
import torch

from tests.monitor.planned import wait_until
from tests.served import D, K, batch, call, oracle, pool
from torch_eaas import client_pairs
from torch_eaas.client import Client
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.server import ExpertServer


def descriptors() -> dict[str, int]:
    """Return how many descriptors of windows and sockets this process has."""
    kinds = {"memfd": 0, "socket": 0}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        for kind in kinds:
            kinds[kind] += kind in target
    return kinds


def no_memory(*args: object, **more: object) -> None:
    raise MemoryError("planned")


@pytest.mark.parametrize(
    "fails",
    ["in the server", "in the client, after the server's answer"],
)
def test_a_handshake_that_fails_half_way_leaves_no_pair_no_window_and_no_link(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ExpertServer(pool(), ServerConfig(name="s"), transport=SharedMemoryTransport())
    with server.serve_in_background():
        gc.collect()
        before = descriptors()
        with monkeypatch.context() as patch:
            if fails == "in the server":
                patch.setattr(server._control, "make_pair", no_memory)
            else:
                patch.setattr(client_pairs.Connection, "__init__", no_memory)
            # pytest keeps what is logged, with the error, and that keeps the frames' windows
            patch.setattr(logging.root.manager, "disable", logging.CRITICAL)
            client = Client(
                ClientConfig(hidden_size=D, top_k=K),
                servers=[server.address],
                transport=SharedMemoryTransport(),
                background=False,
            )
            assert client._connections.live == {}
            assert "planned" in client._connections.refusals["s"]
            wait_until(lambda: server.num_clients == 0)
            gc.collect()
            wait_until(lambda: descriptors() == before, 5)
        with client:
            wait_until(lambda: _connects(client))
            inputs = batch(3)
            out = call(client, 1, *inputs)
            torch.testing.assert_close(out.double(), oracle(1, *inputs), rtol=1e-5, atol=1e-5)
            assert server.num_clients == 1


def _connects(client: Client) -> bool:
    client._connections.maintain(in_threads=False)
    return bool(client._connections.live)
