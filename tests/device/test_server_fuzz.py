"""Whatever a client writes into its window, a device server answers what a host-driven one does."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.served import LAYERS, D, E, K, batch, oracle, pool
from tests.served_slabs import SPEC, T, server_of, slab
from tests.test_server_pairs import FIELD_BITS, IDS
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.protocol.layout import REQUEST_HEADER, Status
from torch_eaas.server import ExpertServer

INSTANCE = 0xC1


class End:
    """A server that is stepped, and one client whose window is written by hand."""

    def __init__(self, *, on_device: bool) -> None:
        self._transport = LoopbackTransport()
        if on_device:
            self.server: Any = server_of(slab(), transport=self._transport)
        else:
            config = ServerConfig(name="host")
            self.server = ExpertServer(pool(), config, transport=self._transport)
        self._client = self.client(INSTANCE)

    def client(self, instance: int) -> Client:
        config = ClientConfig(hidden_size=D, top_k=K, max_tokens=T, max_micro_batches=1)
        return Client(
            config,
            servers=[self.server.address],
            transport=self._transport,
            instance=instance,
            background=False,
        )

    def answer(self, word: int, header: list[int], ids: list[int], hidden: bytes) -> Any:
        """Write a request into slot 0; return word, status and size of what is answered."""
        [conn] = self._client._connections.live.values()
        at = SPEC.request_slot(0)
        REQUEST_HEADER.pack_into(conn._requests, at, *header)
        struct.pack_into(f"<{len(ids)}I", conn._requests, at + SPEC.ids_offset, *ids)
        start = at + SPEC.hidden_offset
        conn._requests[start : start + len(hidden)] = hidden
        conn._request_words[0] = word
        if not self.server.step():
            return None
        reply = conn.header(0)
        status = Status(reply.status)
        return conn.reply_words[0], status, reply.size if status is Status.OK else None

    def still_serves(self) -> None:
        other = self.client(INSTANCE + 1)
        ticket = other.dispatch(1, *batch(3), num_experts=E)
        assert self.server.step() == 1
        out = other.combine(ticket)
        torch.testing.assert_close(out.double(), oracle(1, *batch(3)), rtol=1e-4, atol=1e-4)

    def close(self) -> None:
        self._client.close()
        self.server.close()


@contextmanager
def both() -> Iterator[tuple[End, End]]:
    ends = End(on_device=False), End(on_device=True)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


@settings(max_examples=30)
@given(data=st.data())
def test_both_answer_the_same_and_serve_on(data: st.DataObject) -> None:
    draw: Any = data.draw
    word = draw(st.sampled_from([0x101, 0x101, 0x102]) | st.integers(0, (1 << 64) - 1))
    num_tokens = draw(st.integers(1, T))
    # never a budget that may be over or not as time goes
    budget_us = draw(st.sampled_from([10**9, 1 << 63, (1 << 64) - 1]))
    layer = draw(st.sampled_from(LAYERS))
    header = [INSTANCE, 1, word >> 8, 0, budget_us, layer, num_tokens, 0]
    for field in draw(st.sets(st.sampled_from([0, 1, 2, 3, 5, 6, 7]), max_size=2)):
        header[field] = draw(st.integers(0, (1 << FIELD_BITS[field]) - 1))
    good = st.sampled_from([0, 1, E - 1, 0xFFFFFFFF])
    ids = draw(st.lists(draw(st.sampled_from([good, IDS])), min_size=T * K, max_size=T * K))
    # tokens of any bits: NaN and infinity are among them
    hidden = random.Random(draw(st.integers(0, 9))).randbytes(T * D * 4)
    with both() as (host, device):
        expected = host.answer(word, header, ids, hidden)
        assert device.answer(word, header, ids, hidden) == expected
        device.still_serves()
