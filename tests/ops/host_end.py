"""A host-driven end in a process of its own: what the device path's ends talk to.

``serve`` runs a real server and prints where it is. ``ask`` runs a real client and prints what each
request of a script was answered with; then it opens a pair by hand and prints what a frame of
another epoch is answered with. Both end when their standard input does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from tests.protocol.record_traces import CLIENT, LAYERS, D, E, K, ScalingExperts
from torch_eaas.client import Client
from torch_eaas.client_pairs import Connection, open_connection
from torch_eaas.client_pieces import Piece
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.placement import ServerInfo
from torch_eaas.protocol.layout import PROTOCOL_VERSION, PairSpec
from torch_eaas.protocol.pairs import ClientPair
from torch_eaas.server import ExpertServer
from torch_eaas.server_pairs import ServerPair

T = 3
FORGER = CLIENT + 0x100
SPEC = PairSpec(hidden_size=D, top_k=K, slots=2, max_tokens=T)
TIMEOUT_S = 60.0

Request = tuple[int, list[list[float]], list[list[int]], list[list[float]]]
"""Layer, tokens, ids and weights."""


def script() -> list[Request]:
    """Return requests of one to three tokens of both layers; all their answers are exact."""
    requests: list[Request] = []
    for i, count in enumerate((1, 3, 2, 3, 1)):
        x = [[(i + t + 1) * 2.0 ** (d - 3) for d in range(D)] for t in range(count)]
        ids = [
            [(i + t + k) % E if (i + t) % 4 or k else -1 for k in range(K)] for t in range(count)
        ]
        weights = [[0.5 * (t + 1), 0.25 * (i + 1)] for t in range(count)]
        requests.append((LAYERS[i % 2], x, ids, weights))
    return requests


def answer_of(request: Request) -> list[list[float]]:
    """Return what a request is answered with: expert e of layer n multiplies by n + e."""
    layer, x, ids, weights = request
    return [
        [
            sum((layer + e) * w * number for e, w in zip(ids[t], weights[t], strict=True) if e >= 0)
            for number in token
        ]
        for t, token in enumerate(x)
    ]


def open_by_hand(address: str, instance: int, epoch: int = 1) -> Connection:
    """Open a pair to a server by the real handshake."""
    transport = SharedMemoryTransport()
    link = transport.dial(address, TIMEOUT_S)
    about, _ = link.call("describe", {}, timeout=TIMEOUT_S)
    conn, _ = open_connection(
        Connection,
        transport,
        link,
        SPEC,
        server=ServerInfo(
            name="host", instance=int(about["instance"], 16), address=address, holdings={}
        ),
        pair=ClientPair(),
        hello={
            "client": "device",
            "instance": f"{instance:016x}",
            "epoch": epoch,
            "protocol": PROTOCOL_VERSION,
            "fingerprint": "",
        },
    )
    return conn


class DyingPair(ServerPair):
    """Kills its process where it would store the reply word of one of its requests."""

    def __init__(self, words: int, **fields: Any) -> None:
        super().__init__(**fields)
        self._left = words

    @override
    def _store_word(self, slot: int, word: int) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._store_word(slot, word)


def serve(die_at: int) -> None:
    experts = ScalingExperts(lambda: None)
    with ExpertServer(experts, ServerConfig(name="host")) as server:
        if die_at:
            server._control.make_pair = partial(DyingPair, die_at)
        server.serve_in_background()
        tell(server.address)
        sys.stdin.read()


def ask(address: str) -> None:
    config = ClientConfig(hidden_size=D, top_k=K, max_tokens=T, max_micro_batches=1)
    with Client(config, servers=[address], instance=CLIENT) as client:
        for layer, x, ids, weights in script():
            tensors = (torch.tensor(x), torch.tensor(ids), torch.tensor(weights))
            ticket = client.dispatch(layer, *tensors, num_experts=E)
            tell(client.combine(ticket).tolist())
        forge(address)
        sys.stdin.read()


def forge(address: str) -> None:
    """Send a frame of another epoch by hand, and tell what it is answered with."""
    conn = open_by_hand(address, FORGER)
    layer, x, ids, weights = script()[1]
    piece = Piece(0, *(torch.tensor(each).numpy() for each in ([0, 1, 2], ids, weights)))
    conn.epoch += 1
    slot = conn.take()
    assert slot is not None
    word = conn.send(slot, layer, torch.tensor(x).numpy(), piece, 10**9, 1)
    deadline = time.monotonic() + TIMEOUT_S
    while conn.reply_words[slot] != word and time.monotonic() < deadline:
        time.sleep(0.001)
    header = conn.header(slot)
    tell([*header, conn.text(slot, header.size)])


def tell(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    role, argument = sys.argv[1:]
    if role == "serve":
        serve(int(argument))
    else:
        ask(argument)
