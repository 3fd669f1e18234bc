"""The stage of puts is there for the transport that needs it, and for no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comm.fake_nvshmem import FakeNvshmem, make_wheel
from tests.ops.windowed import SPEC, Pair
from torch_eaas.comm import nvshmem_checks
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.nvshmem import Far, NvshmemConfig, NvshmemWorld
from torch_eaas.comm.nvshmem_library import NvshmemLibrary
from torch_eaas.comm.nvshmem_transport import NvshmemTransport
from torch_eaas.device_puts import Puts
from torch_eaas.ops.pair_table import ClientTables, Column, ServerTables

ONE = torch.ones(1, dtype=torch.int32)
OPEN = torch.zeros(1, dtype=torch.int64)


@pytest.fixture
def transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvshmemTransport:
    for name in ("NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_DISABLE_DATA_DIRECT"):
        monkeypatch.setenv(name, "?")
    lib = make_wheel(tmp_path / "nvshmem", "3.6.5", "libnvshmem_device.bc")
    monkeypatch.setattr(nvshmem_checks, "wheel_folders", lambda: [lib])
    library = NvshmemLibrary(0, ibgda=False, modules=FakeNvshmem().modules)
    config = NvshmemConfig(role="client", pe=0, num_pes=2)
    return NvshmemTransport(
        NvshmemWorld.open(config, SPEC, lambda made: made or b"", library=library)
    )


def far_of(peer: Pair, window: Column) -> Far:
    return Far(int(peer.row[window]), 1)


def test_a_request_goes_where_the_pairs_row_says(transport: Any) -> None:
    staged, peer = Pair(), Pair()
    staged.request(1, 0x101, num_tokens=2)
    tables = ClientTables.empty(1, SPEC.slots)
    tables.pairs_PC[0], tables.slots_P[0] = staged.row, 1
    puts = Puts(transport, 1, "cpu")
    # a pair that stores reach is skipped
    puts.reach_server(0, SPEC, None)
    puts.send_requests(tables, ONE, OPEN)
    assert not any(peer.requests)
    puts.reach_server(0, SPEC, far_of(peer, Column.REQUESTS))
    puts.send_requests(tables, ONE, OPEN)
    assert bytes(peer.requests) == bytes(staged.requests)
    assert puts.table_PQ.tolist() == [[int(peer.row[Column.REQUESTS]), 1, 6 * 4]]


def test_a_reply_goes_where_the_pairs_row_says(transport: Any) -> None:
    staged, peer = Pair(), Pair()
    staged.reply(1, 0x102, size=2)
    tables = ServerTables.empty(1, SPEC.slots)
    tables.pairs_PC[0] = staged.row
    puts = Puts(transport, 1, "cpu")
    puts.reach_client(0, SPEC, far_of(peer, Column.REPLIES))
    puts.send_replies(tables, ONE * 0, ONE, OPEN)
    assert bytes(peer.replies) == bytes(staged.replies)
    assert puts.table_PQ.tolist() == [[int(peer.row[Column.REPLIES]), 1, 6 * 4]]


def test_with_other_transports_it_is_no_stage() -> None:
    puts = Puts(LoopbackTransport(), 3, "cpu")
    assert not puts.is_needed
    assert puts.table_PQ.shape == (3, 3)
    # not even looked at
    nothing: Any = None
    puts.send_requests(nothing, nothing, nothing)
    puts.send_replies(nothing, nothing, nothing, nothing)
