"""Clients and servers that are given a transport's name, or a transport that is not for them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.comm.fake_cuda import fake_transport
from tests.comm.test_shared_memory import needs_x86
from torch_eaas.client import Client
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig
from torch_eaas.errors import ConfigError, ExpertUnavailable
from torch_eaas.experts import ExpertPool
from torch_eaas.server import ExpertServer
from torch_eaas.testing import random_experts

CONFIG = ClientConfig(hidden_size=8, top_k=1)


def pool() -> ExpertPool:
    pool = ExpertPool(hidden_size=8, intermediate_size=8)
    pool.update(random_experts(hidden_size=8, intermediate_size=8, layers=[0], num_experts=1))
    return pool


def meet(server: Transport | str, client: Transport | str, seconds: float) -> None:
    """Let a client open its pair with a server."""
    with (
        ExpertServer(pool(), transport=server).serve_in_background() as running,
        Client(CONFIG, servers=[running.address], transport=client) as asking,
    ):
        asking.wait_ready([0], 1, timedelta(seconds=seconds))
        assert running.num_clients == 1


@needs_x86
@pytest.mark.parametrize("server", ["auto", "shared_memory"])
def test_ends_that_are_given_names_meet(server: str) -> None:
    meet(server, "auto", 30)


@pytest.mark.parametrize("name", ["loopback", "cuda_ipc", "nvshmem", "tcp"])
def test_a_name_that_cannot_be_an_ends_on_the_cpu_is_refused_when_it_is_built(name: str) -> None:
    message = "make one LoopbackTransport" if name == "loopback" else f"'{name}'"
    with pytest.raises(ConfigError, match=message):
        Client(CONFIG, servers=["unix:@nobody"], transport=name)
    with pytest.raises(ConfigError, match=message):
        ExpertServer(pool(), transport=name)


@needs_x86
@pytest.mark.parametrize(
    ("server", "client", "message"),
    [
        (fake_transport, lambda: "auto", "windows are shared_memory's, this server's are cuda_ipc"),
        (lambda: "auto", fake_transport, "windows are cuda_ipc's, this server's are shared_memory"),
        (fake_transport, fake_transport, "lies in GPU memory, where the host reads nothing"),
    ],
    ids=["the server", "the client", "both"],
)
def test_host_driven_ends_say_why_they_do_not_meet_in_gpu_memory(
    server: object, client: object, message: str
) -> None:
    with pytest.raises(ExpertUnavailable, match=message):
        meet(server(), client(), 0.5)  # type: ignore[operator]
