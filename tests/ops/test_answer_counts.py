"""The device's counters add up what each iteration answered."""

from __future__ import annotations

import pytest
import torch

from tests.ops.windowed import numbers
from torch_eaas.errors import ConfigError
from torch_eaas.ops import answer_counts
from torch_eaas.ops.answer_counts import NUM_COUNTERS, Count, count_answers
from torch_eaas.protocol.layout import Status

int32 = torch.int32


@pytest.mark.parametrize("run", [answer_counts._op, answer_counts.launch], ids=["twin", "kernel"])
def test_iterations_add_up(run: object) -> None:
    assert callable(run)
    counters_C = torch.zeros(NUM_COUNTERS, dtype=torch.int64)
    # the docstring's example, an idle iteration, and one that only refuses
    run(
        counters_C,
        numbers(0, 3, -1, dtype=int32),
        numbers(2, 0, 0, dtype=int32),
        numbers(10),
        numbers(15),
    )
    run(
        counters_C,
        numbers(-1, -1, -1, dtype=int32),
        numbers(0, 0, 0, dtype=int32),
        numbers(20),
        numbers(90),
    )
    run(
        counters_C,
        numbers(1, 7, 1, dtype=int32),
        numbers(0, 0, 0, dtype=int32),
        numbers(95),
        numbers(99),
    )
    counted = counters_C.tolist()
    assert counted[: Count.STATUSES] == [3, 1, 2, 5]
    by_status = dict(zip(Status, counted[Count.STATUSES :], strict=True))
    assert {status: n for status, n in by_status.items() if n} == {
        Status.OK: 1,
        Status.DRAINING: 1,
        Status.UNKNOWN_EXPERT: 2,
        Status.STALE: 1,
    }


def test_counters_of_another_width_are_refused() -> None:
    counters = torch.zeros(NUM_COUNTERS)
    with pytest.raises(ConfigError, match=r"counters_C must be int64, got torch.float32"):
        count_answers(
            counters, numbers(0, dtype=int32), numbers(1, dtype=int32), numbers(0), numbers(0)
        )
