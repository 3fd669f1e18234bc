"""Processes that a benchmark starts: pinned, commanded over a pipe, gone with their parent."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

from torch_eaas.errors import PeerGone, PeerTimeout

READY_S = 120.0

Target = Callable[..., None]
"""``target(pipe, *args)``: works until the pipe ends."""


class Worker:
    """A process at the other end of ``pipe``; a context manager that ends it.

    Args:
        target: A module's function; it gets the pipe and ``args``, and returns when it ends.
        args: What it gets; must pickle.
        cores: The cores that it may run on.
    """

    def __init__(self, target: Target, args: Sequence[Any], *, cores: Sequence[int]) -> None:
        context = multiprocessing.get_context("forkserver")
        # one process imports torch and forks all others; it computes nothing
        context.set_forkserver_preload(["torch"])
        self.pipe, child = context.Pipe()
        self._process = context.Process(
            target=_begin,
            args=(target, child, tuple(cores), dict(os.environ), tuple(args)),
            daemon=True,
        )
        self._process.start()
        child.close()

    def receive(self, timeout: float = READY_S) -> Any:
        """Return what the process sends next.

        Raises:
            PeerGone: It has ended.
            PeerTimeout: It sent nothing within ``timeout`` seconds.
        """
        name = f"worker {self._process.pid}"
        if not self.pipe.poll(timeout):
            raise PeerTimeout(f"{name} sent nothing within {timeout:g} s")
        try:
            return self.pipe.recv()
        except EOFError as error:
            self._process.join(5)
            raise PeerGone(f"{name} ended with {self._process.exitcode}") from error

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._process.kill()
        self._process.join(5)

    def close(self) -> None:
        """End the process; safe twice."""
        self.pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _begin(
    target: Target,
    pipe: Connection,
    allowed: tuple[int, ...],
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    # what forks has that of the first worker's time
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, allowed)
    target(pipe, *args)
