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

pytestmark = pytest.mark.usefixtures("implementation")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 63, 2500])
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
    x_RTD = torch.full((4, 4, hidden), 7.0).to(DTYPES[dtype])
    expected = x_RTD.view(torch.uint8).clone()
    # pair 1's slot 0, pair 0's slot 1, one that was refused, and none
    taken = [(1, 0, 4), (0, 1, 3), (0, 0, 0)]
    for r, (p, slot, count) in enumerate(taken):
        at = spec.request_slot(slot) + spec.hidden_offset
        size = count * hidden * x_RTD.element_size()
        data = bytearray(pairs[p].requests[at : at + size])
        if count:
            rows = torch.frombuffer(data, dtype=torch.uint8).view(count, -1)
            expected[r, :count] = rows
    read_hidden(
        tables,
        numbers(*[p * 2 + slot for p, slot, _ in taken], -1, dtype=torch.int32),
        numbers(*[count for *_, count in taken], 0, dtype=torch.int32),
        x_RTD,
        blocks=3,
    )
    assert torch.equal(x_RTD.view(torch.uint8), expected)


def test_a_batch_of_two_dimensions_is_refused() -> None:
    none, tables = numbers(0, dtype=torch.int32), ServerTables.empty(1, 1)
    with pytest.raises(ConfigError, match=r"x_RTD must have 3 dimensions, got shape \(2, 3\)"):
        read_hidden(tables, none, none, torch.zeros(2, 3))
