from __future__ import annotations

import pytest

from torch_eaas.cli.phases import Mark, phase_of

COUNTERS = {"experts_us": 1000, "wait_us": 5000, "bookkeeping_us": 300, "resends": 2, "hedges": 1}


def marks(*steps: tuple[float, int, int, int, int]) -> list[Mark]:
    """Marks at seconds, with what was counted of each counter until then beyond COUNTERS."""
    names = ("experts_us", "wait_us", "bookkeeping_us", "resends")
    return [
        Mark(time, {**COUNTERS, **{n: COUNTERS[n] + m for n, m in zip(names, more, strict=True)}})
        for time, *more in steps
    ]


def test_times_add_up_to_the_whole() -> None:
    phase = phase_of(
        "p", marks((5.0, 0, 0, 0, 0), (5.1, 9, 9, 9, 0), (5.4, 60_000, 100_000, 20_000, 3))
    )
    assert phase is not None
    assert (phase.name, phase.tokens, phase.resends, phase.hedges) == ("p", 2, 3, 0)
    assert phase.total_ms == pytest.approx(200)
    assert phase.experts_ms == pytest.approx(30)
    assert phase.waiting_ms == pytest.approx(20)
    assert phase.bookkeeping_ms == pytest.approx(10)
    assert phase.rest_ms == pytest.approx(140)
    assert phase.tokens_per_s == pytest.approx(5)
    assert (phase.longest_ms, phase.median_ms) == pytest.approx((300, 200))
    assert phase.to_json()["rest_ms"] == 140


def test_local_experts_have_only_their_own_time() -> None:
    phase = phase_of("local", [Mark(0.0, {}), Mark(0.01, {"experts_us": 4000})])
    assert phase is not None
    assert (phase.experts_ms, phase.waiting_ms, phase.bookkeeping_ms) == (4, 0, 0)
    assert phase.rest_ms == pytest.approx(6)


@pytest.mark.parametrize("times", [[], [1.0]], ids=["no token", "one token"])
def test_without_a_gap_there_is_no_phase(times: list[float]) -> None:
    assert phase_of("p", [Mark(time, {}) for time in times]) is None
