"""What a hostile client may write into its window: the server copies once, and never falls."""

from __future__ import annotations

import struct
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.served import E, K, batch, oracle
from tests.test_server import ByHand
from torch_eaas.protocol.layout import REQUEST_HEADER, Status


def test_a_client_that_changes_its_header_after_the_first_look_changes_nothing() -> None:
    hand = ByHand(max_rows=8 * K)
    one, two = hand.client(name="one"), hand.client(name="two")
    first = one.dispatch(1, *batch(7, 1), num_experts=E)
    second = two.dispatch(1, *batch(2, 2), num_experts=E)
    # seven rows and two are more than eight: the server has looked at both and run one
    assert hand.server.step() == 1
    [waiting] = [pair for pair in hand.server._control.pairs if pair.slots.num_ready]
    client = two if waiting.client == "two" else one
    conn = client._connections.live["s"]
    header = list(REQUEST_HEADER.unpack_from(conn._requests, conn.spec.request_slot(0)))
    header[6] = conn.spec.max_tokens
    REQUEST_HEADER.pack_into(conn._requests, conn.spec.request_slot(0), *header)
    assert hand.server.step() == 1
    assert sorted(hand.experts.batches) == [2, 7]
    for user, ticket, inputs in ((one, first, batch(7, 1)), (two, second, batch(2, 2))):
        out = user.combine(ticket)
        torch.testing.assert_close(out.double(), oracle(1, *inputs), rtol=1e-5, atol=1e-5)


IDS = st.sampled_from([0, 1, E - 1, 0xFFFFFFFF]) | st.integers(0, (1 << 32) - 1)
FIELD_BITS = [64] * 5 + [32] * 3


@settings(max_examples=40)
@given(data=st.data())
def test_no_request_that_a_client_can_write_ends_the_server(data: st.DataObject) -> None:
    hand = ByHand()
    draw: Any = data.draw
    client = hand.client(max_tokens=4, wire_dtype=draw(st.sampled_from(["fp32", "fp8"])))
    conn = client._connections.live["s"]
    spec, at = conn.spec, conn.spec.request_slot(0)
    word = draw(st.sampled_from([0x101, 0x101, 0x102]) | st.integers(0, (1 << 64) - 1))
    header = [client.instance, 1, word >> 8, 0, 10**9, 1, 4, 0]
    for field in draw(st.sets(st.integers(0, len(header) - 1), max_size=2)):
        header[field] = draw(st.integers(0, (1 << FIELD_BITS[field]) - 1))
    REQUEST_HEADER.pack_into(conn._requests, at, *header)
    ids = draw(st.lists(IDS, min_size=4 * K, max_size=4 * K))
    struct.pack_into(f"<{4 * K}I", conn._requests, at + spec.ids_offset, *ids)
    # weights, scales and tokens of any bits: NaN and infinity are among them
    size = spec.request_slot_bytes - spec.weights_offset
    bits = draw(st.binary(min_size=size, max_size=size))
    conn._requests[at + spec.weights_offset : at + spec.request_slot_bytes] = bits
    conn._request_words[0] = word
    answered = hand.server.step()
    if answered:
        assert conn.reply_words[0] == word & ~0xFF | 2
        assert conn.header(0).status in set(Status)
    # and it serves another client as before
    other = hand.client(name="other")
    ticket = other.dispatch(1, *batch(3), num_experts=E)
    assert hand.server.step() == 1
    out = other.combine(ticket)
    torch.testing.assert_close(out.double(), oracle(1, *batch(3)), rtol=1e-5, atol=1e-5)
    other.close()
    client.close()
    hand.server.close()
