"""A real server in a process of its own answers what a client stages and puts as what it stores."""

from __future__ import annotations

import struct
import time

import pytest
import torch

from tests.ops.device_ends import PAIRS, DeviceClient, Part, Windows
from tests.ops.host_end import SPEC, TIMEOUT_S, answer_of, open_by_hand, script
from tests.ops.implementations import use_kernels
from tests.ops.processes import host_end, needs_x86, told
from tests.ops.windowed import Pair, address_of
from tests.protocol.record_traces import CLIENT
from torch_eaas.ops.put_slots import put_requests
from torch_eaas.ops.put_table import NO_PUT, request_put_row

pytestmark = needs_x86

OPEN = torch.zeros(1, dtype=torch.int64)


def test_a_host_driven_server_answers_what_is_put_as_it_answers_what_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_kernels(monkeypatch)
    with host_end("serve", 0) as process:
        address = told(process)
        conns = [open_by_hand(address, CLIENT + 1 + p) for p in range(2)]
        # stores reach the first pair's window; the second's requests are staged and put
        staged = Pair(spec=SPEC)
        puts_PQ = torch.tensor([NO_PUT] * PAIRS)
        window = address_of(conns[1]._requests)
        puts_PQ[1] = torch.tensor(request_put_row(SPEC, window=window, pe=0))
        client = DeviceClient(SPEC)
        written = conns[0]._requests, staged.requests
        for p, conn in enumerate(conns):
            client.open(p, Windows(written[p], conn._replies, conn.instance, conn.epoch))
        for number, slot in enumerate((0, 1, 0)):
            layer, x, ids, weights = script()[number]
            part = Part(slot, range(len(x)), ids, weights)
            counts_P = client.send(layer, torch.tensor(x), {0: part, 1: part}, budget_us=10**8)
            at = slice(8 * slot, 8 * slot + 8)
            seen = bytes(conns[1]._requests[at])
            put_requests(client.tables, puts_PQ, counts_P, OPEN, bitcode="")
            assert bytes(conns[1]._requests[at]) == bytes(conns[0]._requests[at]) != seen
            for p, conn in enumerate(conns):
                wait_for_answer(conn._requests[at], conn._replies, slot)
                assert client.rows(p, slot, len(x)).tolist() == answer_of(script()[number])
        for conn in conns:
            conn.link.close()


def wait_for_answer(request_word: memoryview, replies: memoryview, slot: int) -> None:
    (word,) = struct.unpack("<Q", request_word)
    deadline = time.monotonic() + TIMEOUT_S
    while struct.unpack_from("<Q", replies, 8 * slot) != (word + 1,):
        assert time.monotonic() < deadline, "no answer came"
        time.sleep(0.001)
