"""The tuner: what it keeps for which GEMMs, and that it never measures inside a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from torch_eaas.errors import ConfigError
from torch_eaas.ops import ActiveGroups, GemmTuner, quantize_blocks
from torch_eaas.ops.gemm_config import candidates, default_config


class Stopwatch:
    """Says what a call took: the given times in turn, and infinity where it has no more."""

    def __init__(self, *times: float) -> None:
        self.times: Iterator[float] = iter(times)
        self.calls = 0

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.calls += 1
        return next(self.times, 1e9)


def groups(*counts: int, block_rows: int = 16) -> ActiveGroups:
    return ActiveGroups.of(torch.tensor(counts, dtype=torch.int32), block_rows)


X_MK, WEIGHTS_SNK = torch.ones(3, 8), torch.ones(2, 5, 8)


def tune(tuner: GemmTuner, lists: ActiveGroups, rows_R: Tensor | None = None) -> object:
    return tuner.tune(X_MK, WEIGHTS_SNK, lists, rows_R=rows_R)


def test_the_fastest_is_kept_and_found_again() -> None:
    watch = Stopwatch(5.0, 4.0, 2.0, 3.0)
    tuner, lists = GemmTuner(measure=watch), groups(2, 1)
    fastest = candidates(16)[2]
    assert tune(tuner, lists) == fastest
    assert watch.calls == len(candidates(16))
    assert tuner.config(X_MK, WEIGHTS_SNK, lists) == fastest
    # other counts are the same bucket: nothing new is measured
    assert tune(tuner, groups(0, 3)) == fastest
    assert watch.calls == len(candidates(16))


def test_without_measurement_there_is_the_default() -> None:
    tuner = GemmTuner()
    assert tuner.config(X_MK, WEIGHTS_SNK, groups(2, 1)) == default_config(16)


def test_each_bucket_is_tuned_by_itself() -> None:
    watch = Stopwatch()
    tuner = GemmTuner(measure=watch)
    rows_R = torch.zeros(5, dtype=torch.int32)
    each = len(candidates(16))
    tune(tuner, groups(2, 1))
    tune(tuner, groups(2, 1), rows_R)
    assert watch.calls == 2 * each, "eight rows at most are another bucket than four"
    tune(tuner, groups(2, 1), rows_R[:4])
    assert watch.calls == 2 * each
    tune(tuner, groups(2, 1, block_rows=128))
    assert watch.calls == 2 * each + len(candidates(128))


def test_fp8_is_tuned_by_its_own_gemm() -> None:
    x = quantize_blocks(X_MK, (1, 128))
    values, scales = quantize_blocks(WEIGHTS_SNK[0], (128, 128))
    tuner = GemmTuner(measure=Stopwatch(9.0, 1.0))
    weights = values.expand(2, 5, 8).contiguous(), scales.expand(2, 1, 1).contiguous()
    assert tuner.tune(x, weights, groups(2, 1)) == candidates(16)[1]
    assert tuner.config(X_MK, WEIGHTS_SNK, groups(2, 1)) == default_config(16)


def test_sums_are_cut_only_where_bits_may_change() -> None:
    each = len(candidates(16, batch_invariant=False))
    tuner = GemmTuner(batch_invariant=False, measure=Stopwatch(*range(each, 0, -1)))
    assert tune(tuner, groups(2, 1)) == candidates(16, batch_invariant=False)[-1]


def test_what_the_gpu_has_no_room_for_is_passed_over() -> None:
    calls = 0

    def measure(run: Callable[[], object]) -> float:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return 10.0 - calls

    tuner = GemmTuner(measure=measure)
    each = len(candidates(16))
    assert tune(tuner, groups(2, 1)) == candidates(16)[each - 1 - each % 2]


def test_nothing_is_measured_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(5.0, 1.0)
    tuner, lists = GemmTuner(measure=watch), groups(2, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match=r"inside a CUDA graph's capture.* call it before"):
        tune(tuner, lists)
    assert watch.calls == 0
    assert tuner.config(X_MK, WEIGHTS_SNK, lists) == default_config(16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    found = tune(tuner, lists)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tune(tuner, lists) == found, "what is known needs no measurement"


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ConfigError, match="tune needs tensors on a CUDA GPU, got device cpu"):
        tune(GemmTuner(), groups(2, 1))
