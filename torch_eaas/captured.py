"""A fixed list of launches, run again and again: a CUDA graph on a GPU, the calls on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Captured(Generic[T]):
    """Work whose launches are recorded once and then replayed.

    Everything that may change between replays is read from tensors, and ``outputs`` are the same
    tensors each time: what a replay writes, the next one overwrites.

    Args:
        work: Launches, without a host sync; called ``warmups`` times and once more for the capture.
        device: Where it runs.
        warmups: Calls before the capture, so that every kernel is loaded; none on a CPU.
    """

    def __init__(
        self, work: Callable[[], T], *, device: torch.device | str, warmups: int = 2
    ) -> None:
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.outputs = self._capture(warmups)
        else:
            self.outputs = work()

    def replay(self) -> None:
        """Enqueue the launches on the current stream; on a CPU, run them."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.outputs = self._work()

    def _capture(self, warmups: int) -> T:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(warmups):
                self._work()
        side.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # other threads may allocate and copy meanwhile
        with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
            outputs = self._work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        return outputs
