"""One merged batch: frames of any clients and layers, run together, answered one by one.

Shape legend: T tokens of one batch, K experts per token, D hidden.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torch_eaas.experts import GroupTable
from torch_eaas.ops.quantize import dequantize_blocks
from torch_eaas.placement import Holdings
from torch_eaas.protocol.layout import SCALE_COLUMNS, Status
from torch_eaas.server_pairs import BadFrame, Frame, ServerPair
from torch_eaas.spans import experts_span, is_profiling, mark

logger = logging.getLogger(__name__)


class Experts(Protocol):
    """What a server runs: an ``ExpertPool``, or whatever behaves like one."""

    @property
    def hidden_size(self) -> int:
        """Width of a token."""
        ...

    @property
    def holdings(self) -> Holdings:
        """Layer to the ids of the experts held."""
        ...

    @property
    def table(self) -> GroupTable:
        """The groups of this moment."""
        ...

    def run(
        self,
        table: GroupTable,
        x_TD: Tensor,
        groups_TK: Tensor,
        weights_TK: Tensor,
        *,
        per_expert: bool,
    ) -> Tensor:
        """Return the weighted outputs, fp32: ``(T, D)``, or ``(T, K, D)`` per expert."""
        ...


class BatchRunner:
    """Takes ready frames, runs them merged, and answers each.

    Args:
        experts: What runs them.
        max_rows: Most (token, expert) rows of one batch.
        clock: Seconds, monotonic.
        name: The server's, for the profiler's marks.
    """

    def __init__(
        self, experts: Experts, max_rows: int, clock: Callable[[], float], name: str = "server"
    ) -> None:
        self._name = name
        self._experts = experts
        self._max_rows = max_rows
        self._clock = clock
        self._turn = 0
        self.draining = False
        self.version = 0
        self.counters: Counter[str] = Counter()

    def step(self, pairs: Sequence[ServerPair]) -> int:
        """Serve one batch of what is ready; return the number of frames answered."""
        frames, refused = self._take(pairs)
        if frames:
            for merged in _mergeable(frames):
                self._run(merged)
            self.counters["batches"] += 1
        return len(frames) + refused

    def _take(self, pairs: Sequence[ServerPair]) -> tuple[list[Frame], int]:
        """Take one ready frame per client in turn, until ``max_rows`` or none is left."""
        frames: list[Frame] = []
        refused = rows = 0
        ready = [pair for pair in pairs if pair.slots.num_ready]
        start = self._turn % len(ready) if ready else 0
        ready = ready[start:] + ready[:start]
        self._turn += 1
        while ready:
            for pair in list(ready):
                rows_here = pair.peek_rows()
                if frames and rows + rows_here > self._max_rows:
                    return frames, refused
                frame = self._read(pair)
                if frame is None:
                    refused += 1
                else:
                    frames.append(frame)
                    rows += rows_here
                if not pair.slots.num_ready:
                    ready.remove(pair)
        return frames, refused

    def _read(self, pair: ServerPair) -> Frame | None:
        """Take a pair's next frame, or answer it with an error and return None."""
        slot, word, since = pair.slots.take()
        try:
            if self.draining:
                raise BadFrame(Status.DRAINING, "this server is leaving; ask another holder")
            if is_profiling():
                self._mark("take", pair, slot, word)
            return pair.read(slot, word, since, self._clock())
        except BadFrame as error:
            self._refuse(pair, slot, word, error.status, str(error))
            return None

    def _run(self, frames: list[Frame]) -> None:
        """Run frames of one shape as one batch; if that fails, each alone."""
        table = self._experts.table
        known: list[Frame] = []
        groups: list[Tensor] = []
        for frame in frames:
            groups_TK, unknown = table.groups(frame.layer, frame.ids_TK)
            if unknown:
                text = f"layer {frame.layer}: experts {unknown[:8]} are not held here"
                self._refuse(frame.pair, frame.slot, frame.word, Status.UNKNOWN_EXPERT, text)
            else:
                known.append(frame)
                groups.append(torch.from_numpy(groups_TK))
        if not known:
            return
        started = self._clock()
        try:
            with experts_span({frame.layer for frame in known}):
                out = self._compute(table, known, groups)
        except Exception as error:
            if len(known) > 1:
                for frame in known:
                    self._run([frame])
                return
            logger.exception("a request of client %s failed", known[0].pair.client)
            text = f"{type(error).__name__}: {error}"
            self._refuse(known[0].pair, known[0].slot, known[0].word, Status.INTERNAL, text)
            return
        self._answer(known, out, started)

    def _compute(self, table: GroupTable, frames: list[Frame], groups: list[Tensor]) -> Tensor:
        per_expert = frames[0].pair.spec.combine == "exact"
        if len(frames) == 1:
            x_TD, groups_TK = _numbers(frames[0]), groups[0]
            weights_TK = torch.from_numpy(frames[0].weights_TK)
        else:
            x_TD = torch.cat([_numbers(frame).float() for frame in frames])
            groups_TK = torch.cat(groups)
            weights_TK = torch.from_numpy(np.concatenate([frame.weights_TK for frame in frames]))
        out = self._experts.run(table, x_TD, groups_TK, weights_TK, per_expert=per_expert)
        wanted = (*(groups_TK.shape if per_expert else groups_TK.shape[:1]), x_TD.shape[1])
        if out.shape != wanted:
            raise ValueError(f"the experts must return {wanted}, they gave {tuple(out.shape)}")
        return out

    def _answer(self, frames: list[Frame], out: Tensor, started: float) -> None:
        experts_us = int((self._clock() - started) * 1e6)
        at = 0
        for frame in frames:
            num_tokens = len(frame.ids_TK)
            if is_profiling():
                # before the word: the client's mark cannot come sooner
                self._mark("reply", frame.pair, frame.slot, frame.word)
            frame.pair.answer(
                frame,
                out[at : at + num_tokens],
                queue_us=max(0, int((started - frame.since) * 1e6)),
                experts_us=experts_us,
                version=self.version,
            )
            at += num_tokens
            self.counters["requests"] += 1
            self.counters["tokens"] += num_tokens
        self.counters["experts_us"] += experts_us

    def _mark(self, what: str, pair: ServerPair, slot: int, word: int) -> None:
        mark(what, self._name, pair.instance, pair.epoch, slot, word >> 8)

    def _refuse(self, pair: ServerPair, slot: int, word: int, status: Status, text: str) -> None:
        pair.refuse(slot, word, status, text, version=self.version)
        self.counters["refused"] += 1
        self.counters[f"refused_{status.name.lower()}"] += 1
        if status in (Status.BAD_REQUEST, Status.STALE):
            logger.warning("client %s: %s", pair.client, text)


def _numbers(frame: Frame) -> Tensor:
    """Return a frame's hidden states as numbers that experts take: fp8 is brought back to fp32."""
    if frame.scales_Td is None:
        return frame.hidden_TD
    return dequantize_blocks(frame.hidden_TD, frame.scales_Td, (1, SCALE_COLUMNS))


def _mergeable(frames: list[Frame]) -> list[list[Frame]]:
    """Split frames into lists that can share a batch: the same top-k and combine mode."""
    kinds: dict[tuple[int, str], list[Frame]] = {}
    for frame in frames:
        kinds.setdefault((frame.pair.spec.top_k, frame.pair.spec.combine), []).append(frame)
    return list(kinds.values())
