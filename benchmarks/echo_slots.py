"""Our own slots: a real pair over the real transport, with rows that come back as they went."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from benchmarks.echo import SIZES, TIMEOUT_S, Echo, Side, check_same, payload
from torch_eaas.client_pairs import Connection
from torch_eaas.client_pieces import Piece
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.connections import Connections
from torch_eaas.errors import PeerTimeout, StalePeer
from torch_eaas.experts import ExpertPool
from torch_eaas.placement import Placement, ServerInfo
from torch_eaas.protocol.layout import Status
from torch_eaas.server import HostPath
from torch_eaas.server_control import ServerControl
from torch_eaas.server_pairs import ServerPair

WIDTHS = sorted({hidden for _, hidden in SIZES.values()})
CLIENT_INSTANCE = 7
BUDGET_US = 3600 * 10**6
"""It counts from the server's last look at the slot; the other variants take turns meanwhile."""


class SlotEcho(Echo):
    """The client writes a request and checks the reply's header; the server reads and answers."""

    def __init__(self, side: Side, folder: Path, pipe: Pipe) -> None:
        self._transport = SharedMemoryTransport()
        self._controls: dict[int, ServerControl[ServerPair]] = {}
        self._clients: dict[int, Connections[Connection]] = {}
        for width in WIDTHS:
            address = f"unix:{folder}/slots-{width}"
            if side == "server":
                self._controls[width] = _control(self._transport, width)
                self._transport.listen(address, self._controls[width])
            else:
                self._clients[width] = _connect(self._transport, width, address)

    @override
    def trip(self, size: str, count: int) -> list[float]:
        num_tokens, width = SIZES[size]
        conn = self._clients[width].live["echo"]
        x_TD = payload(size).view(torch.int16).numpy()
        ids_TK, weights_TK = (
            np.zeros((num_tokens, 1), np.int64),
            np.ones((num_tokens, 1), np.float32),
        )
        piece = Piece(0, np.arange(num_tokens), ids_TK, weights_TK)
        times = []
        slot: int | None = None
        for _ in range(count):
            start = time.perf_counter()
            slot = conn.take()
            assert slot is not None
            word = conn.send(slot, 0, x_TD, piece, BUDGET_US, version=1)
            self._await(conn, slot, word)
            conn.slots.release(slot)
            times.append(time.perf_counter() - start)
        assert slot is not None
        check_same(conn.rows(slot, num_tokens).view(torch.int16).numpy(), size)
        return times

    @override
    def echo(self, size: str, count: int) -> None:
        control = self._controls[SIZES[size][1]]
        pair = control.pairs[0]
        for _ in range(count):
            if not self._transport.wait(lambda: pair.scan(time.monotonic()), TIMEOUT_S):
                raise PeerTimeout(f"the server of {size} saw no request within {TIMEOUT_S:g} s")
            slot, word, since = pair.slots.take()
            frame = pair.read(slot, word, since, time.monotonic())
            pair.answer(frame, frame.hidden_TD, queue_us=0, experts_us=0, version=1)

    @override
    def close(self) -> None:
        for connections in self._clients.values():
            connections.close()

    def _await(self, conn: Connection, slot: int, word: int) -> None:
        if not self._transport.wait(lambda: conn.reply_words[slot] == word, TIMEOUT_S):
            raise PeerTimeout(f"the client saw no answer within {TIMEOUT_S:g} s")
        header = conn.header(slot)
        if (header.instance, header.epoch, header.sequence, header.status) != (
            CLIENT_INSTANCE,
            conn.epoch,
            word >> 8,
            Status.OK,
        ):
            raise StalePeer(f"not the answer that was awaited: {header}")


def _control(transport: SharedMemoryTransport, width: int) -> ServerControl[ServerPair]:
    config = ServerConfig(name="echo")
    return ServerControl(
        config=config,
        instance=1,
        transport=transport,
        hidden_size=width,
        holdings=lambda: {0: (0,)},
        # its pairs are served by hand, see echo
        path=HostPath(ExpertPool(width, 1), config, transport, time.monotonic),
        drain=lambda: None,
        clock=time.monotonic,
    )


def _connect(transport: SharedMemoryTransport, width: int, address: str) -> Connections[Connection]:
    config = ClientConfig(
        hidden_size=width, top_k=1, max_tokens=64, wire_dtype="bf16", reply_dtype="bf16"
    )
    connections = Connections(config, CLIENT_INSTANCE, transport, time.monotonic, Connection)
    server = ServerInfo(name="echo", instance=1, address=address, holdings={0: (0,)})
    connections.follow(Placement((server,), 1))
    connections.maintain(in_threads=False)
    return connections
