"""Device ends in processes of their own over CUDA IPC's windows, whose GPU is host memory here."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from tests.comm.fake_cuda import FakeCuda, fake_transport
from tests.comm.transport_contract import eventually
from tests.served import LAYERS, D, E, K, batch, oracle
from tests.served_slabs import T
from torch_eaas.config import ClientConfig
from torch_eaas.device.client import DeviceClient

SERVER = """
import sys
from tests.comm.fake_cuda import fake_transport
from tests.served_slabs import server_of, slab
with server_of(slab(), transport=fake_transport(), name=sys.argv[1]).serve_in_background() as s:
    print(s.address, flush=True)
    sys.stdin.read()
"""


@contextmanager
def server_process(name: str) -> Iterator[subprocess.Popen[str]]:
    """Give a server of all experts; it prints its address."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    ) as process:
        yield process
        process.kill()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_killed_server_costs_no_answer_and_its_windows_mappings_are_given_back() -> None:
    cuda = FakeCuda()
    config = ClientConfig(
        hidden_size=D, top_k=K, max_tokens=T, max_micro_batches=1, graph_wait=timedelta(seconds=2)
    )
    with server_process("s0") as dying, server_process("s1") as other:
        addresses = [address_of(dying), address_of(other)]
        with DeviceClient(config, servers=addresses, transport=fake_transport(cuda)) as client:
            client.wait_ready(LAYERS, E, timedelta(seconds=60))
            for turn in range(4):
                for layer in LAYERS:
                    x, ids, w = batch(T - turn, layer)
                    ticket = client.dispatch(layer, x, ids, w, num_experts=E)
                    got = client.combine(ticket).double()
                    torch.testing.assert_close(got, oracle(layer, x, ids, w), rtol=1e-5, atol=1e-5)
                if turn == 1:
                    # two windows of each pair
                    assert cuda.held["mappings"] == 4
                    dying.kill()
    del client
    # threads that close what is left may take a moment
    assert eventually(lambda: gc.collect() >= 0 and not any(cuda.held.values())), cuda.held
