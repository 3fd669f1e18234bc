"""What the stages of a step write for each other, and what the host reads of them afterwards.

All of it is one piece of memory, so that one node clears it and one copy reads it.

Shape suffixes: see ``ops/pair_table.py``; M micro-batches, O columns of an outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_eaas.ops.reference_client import Outcome, Waited, missing_expert

_HEAD = 16
"""Words before the outcomes: the abort word, and room that keeps what follows aligned."""

_UNEVENTFUL = (Waited.NOTHING, Waited.ARRIVED)


@dataclass(frozen=True, slots=True)
class LaneWords:
    """What one micro-batch's stages use."""

    abort: Tensor
    """The step's abort word, ``(1,)`` int64; eagerly each micro-batch has its own."""
    gate: Tensor
    """``(1,)`` int64."""
    arrivals_P: Tensor
    """int32."""
    outcomes_PO: Tensor
    """int64."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A wait that did not end well."""

    micro_batch: int
    pair: int
    """The pair's row in the tables."""
    waited: Waited
    layer: int
    status: int
    """Of the answer, if one came."""
    size: int
    """Bytes of its text."""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a step."""

    abort: int
    answered: frozenset[int]
    """Pairs whose last wait ended with a good answer."""
    failures: Sequence[Failure]

    @property
    def is_good(self) -> bool:
        """Whether every stage of the step ran."""
        return self.abort == 0

    @property
    def missing(self) -> tuple[int, int] | None:
        """The (layer, expert) that had no pair, if that ended the step."""
        return missing_expert(self.abort)


class StepWords:
    """The words of a step, or of a micro-batch's eager calls.

    Args:
        micro_batches: M.
        pairs: P.
        device: Where they lie.
    """

    def __init__(self, micro_batches: int, pairs: int, device: torch.device) -> None:
        outcomes = micro_batches * pairs * len(Outcome)
        gates = 2 * micro_batches
        # two arrivals a word, and each micro-batch's begin at a multiple of 16 bytes
        arrivals = 2 * -(-pairs // 4)
        size = _HEAD + outcomes + gates + micro_batches * arrivals
        self._words = torch.zeros(size, dtype=torch.int64, device=device)
        self._told = self._words[: _HEAD + outcomes]
        self._host = torch.empty(
            self._told.shape, dtype=torch.int64, device="cpu", pin_memory=self._words.is_cuda
        )
        self._numbers = self._host.numpy()
        self._shape = (micro_batches, pairs, len(Outcome))
        rows_MPO = self._told[_HEAD:].view(self._shape)
        gates_at, arrivals_at = _HEAD + outcomes, _HEAD + outcomes + gates
        self.lanes = [
            LaneWords(
                abort=self._words[:1],
                gate=self._words[gates_at + 2 * m : gates_at + 2 * m + 1],
                arrivals_P=self._words[arrivals_at + m * arrivals :][:arrivals].view(torch.int32)[
                    :pairs
                ],
                outcomes_PO=rows_MPO[m],
            )
            for m in range(micro_batches)
        ]
        """Of each micro-batch its part."""

    def clear(self) -> None:
        """Begin anew, in order with the current stream's work."""
        self._words.zero_()

    def read(self) -> Report:
        """Wait for the current stream, and return what became of the step: one host read."""
        self._host.copy_(self._told, non_blocking=True)
        if self._told.is_cuda:
            torch.cuda.current_stream(self._told.device).synchronize()
        rows_MPO = self._numbers[_HEAD:].reshape(self._shape)
        waited_MP = rows_MPO[:, :, Outcome.WAITED]
        answered = frozenset((waited_MP == Waited.ARRIVED).nonzero()[1].tolist())
        abort = int(self._numbers[0])
        if not abort:
            return Report(0, answered, ())
        failures = [
            Failure(
                m,
                p,
                Waited(row[Outcome.WAITED]),
                row[Outcome.LAYER],
                row[Outcome.STATUS],
                row[Outcome.SIZE],
            )
            for m, rows in enumerate(rows_MPO.tolist())
            for p, row in enumerate(rows)
            if row[Outcome.WAITED] not in _UNEVENTFUL
        ]
        return Report(abort, answered, failures)
