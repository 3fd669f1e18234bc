"""A fixed list of launches, replayed: a CUDA graph on a GPU, the calls themselves on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from torch_eaas.device.stream import undisturbed

R = TypeVar("R")


class Captured(Generic[R]):
    """What ``work`` launches, captured once and replayed as often as wanted.

    Args:
        work: Launches kernels and returns tensors; it must not look at anything on the device. On a
            GPU its tensors stay where they are, and each replay writes them anew.
        device: Where it runs.
        warmups: How often it runs before it is captured, so that every kernel is loaded and every
            library has its workspace.
        is_first: Whether its kernels go before others', as those of such a ``DeviceStream`` do: a
            kernel of a graph has the priority of the stream on which it was captured.
    """

    def __init__(
        self,
        work: Callable[[], R],
        *,
        device: torch.device | str,
        warmups: int = 1,
        is_first: bool = False,
    ) -> None:
        self._work = work
        self._device = torch.device(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.outputs: R
        """What ``work`` returned; on a CPU, the last time that it ran."""
        with side_stream(self._device):
            for _ in range(warmups):
                self.outputs = work()
        if self._device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            # torch's own is one for all threads, and on the GPU of the process's first capture
            stream = torch.cuda.Stream(self._device, priority=-1 if is_first else 0)
            # other threads open and close pairs meanwhile, and that is none of the capture's
            with (
                undisturbed(),
                _no_collection(),
                torch.cuda.device(self._device),
                torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"),
            ):
                self.outputs = work()

    def replay(self) -> None:
        """Run everything again, in order with the current stream's work."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.outputs = self._work()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's collector off: what it finds may unmap memory, which a capture may not see."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run on a stream of its own, as what comes before a capture must; nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)
