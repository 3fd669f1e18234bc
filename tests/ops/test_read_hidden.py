"""Hidden states are copied bit by bit, and only where a request has tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.windowed import Pair, numbers
from torch_eaas.errors import ConfigError
from torch_eaas.ops.pair_table import ServerTables
from torch_eaas.ops.read_hidden import read_hidden
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.row_views import TORCH_DTYPES

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("hidden", [1, 62, 63, 2500])
def test_the_rows_of_each_request_arrive_and_no_others(dtype: str, hidden: int) -> None:
    wire: Any = dtype
    spec = PairSpec(hidden_size=hidden, top_k=1, slots=2, max_tokens=4, wire_dtype=wire)
    pairs = [Pair(spec=spec), Pair(spec=spec)]
    tables = ServerTables.empty(2, 2)
    made = torch.Generator().manual_seed(hidden)
    for p, pair in enumerate(pairs):
        tables.pairs_PC[p] = pair.row
        # any bits, those of NaN too
        bits = torch.randint(0, 256, (len(pair.requests),), generator=made, dtype=torch.uint8)
        pair.requests[:] = bits.numpy().tobytes()
    x_RTD = torch.full((4, 4, hidden), 7.0).to(TORCH_DTYPES[dtype])
    copied = [(spec.hidden_offset, x_RTD)]
    scales_RTd = None
    if dtype == "fp8":
        scales_RTd = torch.full((4, 4, -(-hidden // 128)), 7.0)
        copied.append((spec.scales_offset, scales_RTd))
    expected = [part.view(torch.uint8).clone() for _, part in copied]
    # pair 1's slot 0, pair 0's slot 1, one that was refused, and none
    taken = [(1, 0, 4), (0, 1, 3), (0, 0, 0)]
    for r, (p, slot, count) in enumerate(taken):
        for (offset, _), part in zip(copied, expected, strict=True):
            at = spec.request_slot(slot) + offset
            data = bytearray(pairs[p].requests[at : at + part[r, :count].numel()])
            if count:
                part[r, :count] = torch.frombuffer(data, dtype=torch.uint8).view(count, -1)
    read_hidden(
        tables,
        numbers(*[p * 2 + slot for p, slot, _ in taken], -1, dtype=torch.int32),
        numbers(*[count for *_, count in taken], 0, dtype=torch.int32),
        x_RTD,
        blocks=3,
        scales_RTd=scales_RTd,
    )
    for (_, part), wanted in zip(copied, expected, strict=True):
        assert torch.equal(part.view(torch.uint8), wanted)


def test_fp8_without_room_for_its_scales_is_refused() -> None:
    none, tables = numbers(0, dtype=torch.int32), ServerTables.empty(1, 1)
    x_RTD = torch.zeros(1, 2, 3).to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"scales_RTd belongs to rows of float8_e4m3fn .* none"):
        read_hidden(tables, none, none, x_RTD)


def test_a_batch_of_two_dimensions_is_refused() -> None:
    none, tables = numbers(0, dtype=torch.int32), ServerTables.empty(1, 1)
    with pytest.raises(ConfigError, match=r"x_RTD must have 3 dimensions, got shape \(2, 3\)"):
        read_hidden(tables, none, none, torch.zeros(2, 3))
