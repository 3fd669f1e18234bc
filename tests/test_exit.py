"""Threads in torch when the interpreter ends would end the process hard: they are stopped first."""

import subprocess
import sys

CODE = """
import torch
from tests.served import LAYERS, D, E, K, batch, call, pool
from torch_eaas import Client, ClientConfig, ExpertServer, LoopbackTransport
transport = LoopbackTransport()
server = ExpertServer(pool(), transport=transport).serve_in_background()
client = Client(ClientConfig(hidden_size=D, top_k=K), servers=[server.address], transport=transport)
client.wait_ready(LAYERS, E)
call(client, 1, *batch(4))
client.dispatch(1, *batch(400), num_experts=E)
# neither is closed, and the server is busy
"""


def test_a_process_that_forgets_to_close_ends_well() -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
