"""A device server's rows: who has which, and how long a window's memory is kept."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.served_slabs import SPEC, server_of, slab
from torch_eaas.comm.window import local_window
from torch_eaas.config import Combine, Storage
from torch_eaas.device.server_iteration import DeviceIteration, IterationSizes
from torch_eaas.device.server_pairs import DevicePair, PairRows
from torch_eaas.device.stream import DeviceStream, Mark
from torch_eaas.errors import ConfigError
from torch_eaas.ops.pair_table import Column, ServerTables
from torch_eaas.ops.put_table import PutColumn
from torch_eaas.protocol.layout import PairSpec


class PlannedMark(Mark):
    """A mark that is passed when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = False

    @property
    def is_passed(self) -> bool:
        return self.passed


class PlannedStream(DeviceStream):
    """A stream whose work ends when a test says so."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.marks: list[PlannedMark] = []

    def mark(self) -> Mark:
        self.marks.append(PlannedMark())
        return self.marks[-1]


def pair(instance: int, epoch: int = 1) -> DevicePair:
    return DevicePair(
        peer=instance,
        client=f"client {instance}",
        instance=instance,
        epoch=epoch,
        spec=SPEC,
        requests=local_window(SPEC.request_bytes),
        replies=local_window(SPEC.reply_bytes),
        now=0.0,
    )


def instances(tables: ServerTables) -> list[int]:
    found: list[int] = tables.pairs_PC[:, Column.INSTANCE].tolist()
    return found


def test_rows_are_taken_given_back_and_taken_again_with_a_fresh_book() -> None:
    tables = ServerTables.empty(2, SPEC.slots)
    rows = PairRows(tables, torch.zeros(2, len(PutColumn), dtype=torch.int64), PlannedStream())
    first, second, third = pair(1), pair(2), pair(3)
    rows.apply((first, second))
    assert instances(tables) == [1, 2]
    tables.book_3PS.fill_(9)
    rows.apply((second,))
    assert instances(tables) == [0, 2]
    rows.apply((second, third))
    assert instances(tables) == [3, 2]
    assert tables.book_3PS[:, 0].tolist() == [[0] * SPEC.slots] * 3
    assert tables.book_3PS[:, 1].tolist() == [[9] * SPEC.slots] * 3
    # its first scan counts from when it came
    assert int(tables.scanned_P[0]) > 0


def test_a_window_stays_mapped_until_the_iterations_that_may_write_into_it_have_ended() -> None:
    tables, stream = ServerTables.empty(2, SPEC.slots), PlannedStream()
    rows = PairRows(tables, torch.zeros(2, len(PutColumn), dtype=torch.int64), stream)
    gone = pair(1)
    mapped = weakref.ref(gone.replies.owner)
    rows.apply((gone,))
    rows.apply(())
    del gone
    rows.release()
    gc.collect()
    assert instances(tables) == [0, 0]
    assert mapped() is not None
    stream.marks[-1].passed = True
    rows.release()
    gc.collect()
    assert mapped() is None


@pytest.mark.parametrize(("slots", "rows"), [(1, 128), (64, 32)])
def test_in_exact_mode_the_tile_does_not_depend_on_the_slab(slots: int, rows: int) -> None:
    exact = type(SPEC)(**{**SPEC.to_json(), "combine": "exact"})
    sizes: dict[str, Any] = {"max_pairs": 2, "max_rows": 2048, "max_requests": 2}
    made = slab([], slots=slots)
    assert DeviceIteration(made, IterationSizes(spec=exact, **sizes))._block_rows == 16
    # 2048 rows in so many groups
    partial = DeviceIteration(made, IterationSizes(spec=SPEC, **sizes))
    assert partial._block_rows == rows


def test_a_server_fits_the_slots_that_one_block_can_scan() -> None:
    with server_of(slab(), max_pairs=4096) as server:
        assert server.step() == 0


R1 = PairSpec(hidden_size=7168, top_k=8, slots=4, max_tokens=128)


@pytest.mark.parametrize(
    ("combine", "storage", "mib"),
    [("partial", "bf16", 560), ("exact", "bf16", 2128), ("partial", "fp32", 448)],
)
def test_a_batch_that_no_gpu_memory_is_left_for_is_refused_with_its_size(
    combine: Combine, storage: Storage, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(R1, combine=combine)
    sizes = IterationSizes(spec=spec, max_pairs=64, max_rows=2048, max_requests=64)
    assert sizes.batch_bytes(storage) == mib << 20
    gpu: Any = SimpleNamespace(device=torch.device("cuda", 0), storage=storage)
    # of what is left, torch keeps some for whoever asks
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: ((mib - 9) << 20, 141 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 << 20)
    message = (
        rf"64 requests of 128 tokens needs {mib / 1024:.1f} GiB beside the slab, and cuda:0 has "
        r".* GiB free; lower max_tokens or max_requests"
    )
    with pytest.raises(ConfigError, match=message):
        DeviceIteration(gpu, sizes)
