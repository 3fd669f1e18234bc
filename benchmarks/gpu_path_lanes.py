"""Streams and threads of one process: micro-batches on streams of their own, captures at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from benchmarks.gpu_path_checks import Ends
from benchmarks.harness import WrongResult
from torch_eaas.device.captured import Captured
from torch_eaas.device.captured_step import CapturedStep
from torch_eaas.device.stream import finish_all


class _Lane:
    """A micro-batch with a stream of its own, which begins behind the current one's work."""

    def __init__(self, ends: Ends, index: int) -> None:
        self._ends, self._index = ends, index
        self._stream: torch.cuda.Stream | None = None
        if ends.device.type == "cuda":
            self._stream = torch.cuda.Stream(ends.device)

    @contextmanager
    def forked(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._ends.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(self._ends.client.micro_batch(self._index))
            yield

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._ends.device).wait_stream(self._stream)


@torch.no_grad()
def check_micro_batches(ends: Ends) -> int:
    """Replay one graph in which two micro-batches are under way, each on a stream of its own."""
    experts = [ends.experts(layer) for layer in range(ends.sizes.layers)]
    given = [ends.batch(min(7, ends.sizes.max_tokens), seed) for seed in range(2)]
    lanes = [_Lane(ends, index) for index in range(2)]

    def both() -> list[list[Tensor]]:
        outs = []
        for lane, batch in zip(lanes, given, strict=True):
            with lane.forked():
                outs.append([layer(*batch) for layer in experts])
        for lane in lanes:
            lane.join()
        return outs

    step = CapturedStep(ends.client, both)
    return sum(
        ends.check(f"micro-batch {index}, layer {layer}", layer, given[index], out_TD)
        for _ in range(2)
        for index, outs in enumerate(step.run())
        for layer, out_TD in enumerate(outs)
    )


@torch.no_grad()
def check_eager_micro_batches(ends: Ends) -> int:
    """Call each layer for the first time by two micro-batches at once, the first one's stream busy.

    What it has put into the client's tables must be there for the other one's stream too.
    """
    given = [ends.batch(min(7, ends.sizes.max_tokens), seed) for seed in range(2)]
    lanes = [_Lane(ends, index) for index in range(2)]
    compared = 0
    for layer in range(ends.sizes.layers):
        tickets = []
        for lane, batch in zip(lanes, given, strict=True):
            with lane.forked():
                if lane is lanes[0] and ends.device.type == "cuda":
                    # some 10 ms
                    torch.cuda._sleep(20_000_000)
                ticket = ends.client.dispatch(layer, *batch, num_experts=ends.sizes.num_experts)
                tickets.append(ticket)
        for index, (lane, ticket) in enumerate(zip(lanes, tickets, strict=True)):
            with lane.forked():
                out_TD = ends.client.combine(ticket)
            lane.join()
            name = f"eager micro-batch {index}, layer {layer}"
            compared += ends.check(name, layer, given[index], out_TD)
    return compared


def check_captures(device: torch.device, rounds: int) -> int:
    """Capture graphs in two threads at once while a third one waits for the whole device."""

    def capture(start: int) -> int:
        x = torch.full((1000,), start, device=device)
        for number in range(rounds):
            captured = Captured(lambda: x + 1, device=device)
            x.fill_(start + number)
            captured.replay()
            if not bool((captured.outputs == start + number + 1).all()):
                raise WrongResult(f"capture {number} beside others is not the work that was given")
        return rounds

    def wait() -> int:
        for _ in range(rounds):
            finish_all(device)
        return rounds

    with ThreadPoolExecutor(3) as pool:
        parts = [pool.submit(capture, 0), pool.submit(capture, 7), pool.submit(wait)]
        return sum(part.result(timeout=120) for part in parts)
