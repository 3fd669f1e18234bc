"""A process that has imported torch, and forks others: so a restart takes milliseconds.

What it forks may be killed and stopped, and ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.workers import Worker
from torch_eaas.cli.parent import die_with
from torch_eaas.errors import PeerTimeout

END_S = 10.0
"""How long a signal may take: the memory of a killed process is torn down first."""


class Offspring:
    """A forked process, known by its pidfd: a signal never hits another one.

    Args:
        pid: Its process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._ended = select.poll()
        self._ended.register(self._fd, select.POLLIN)

    def kill(self) -> None:
        """Send SIGKILL and return at once."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGSTOP and wait until it stands still."""
        signal.pidfd_send_signal(self._fd, signal.SIGSTOP)
        deadline = time.monotonic() + END_S
        while self._state() != "T":
            if time.monotonic() > deadline:
                raise PeerTimeout(f"process {self.pid} did not stop within {END_S:g} s")
            time.sleep(1e-4)

    def resume(self) -> None:
        """Send SIGCONT."""
        signal.pidfd_send_signal(self._fd, signal.SIGCONT)

    def wait(self) -> None:
        """Wait for its end; PeerTimeout if that does not come."""
        if not self._ended.poll(1000 * END_S):
            raise PeerTimeout(f"process {self.pid} did not end within {END_S:g} s")

    def close(self) -> None:
        """Kill it and wait for its end; safe twice."""
        if self._fd >= 0:
            self.kill()
            self.wait()
            os.close(self._fd)
            self._fd = -1

    def _state(self) -> str:
        # the name before it may have spaces and brackets
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]


class Nursery:
    """Forks processes at a word over a pipe; a context manager that ends them all.

    Args:
        common: What every function gets first; it may hold memory that all of them share.
    """

    def __init__(self, common: Any) -> None:
        self._worker = Worker(_nurse, (common,), cores=tuple(os.sched_getaffinity(0)))

    def start(self, function: Callable[..., None], *args: Any, nice: int = 0) -> Offspring:
        """Run ``function(common, *args)`` in a process of its own."""
        self._worker.pipe.send((function, args, nice))
        return Offspring(self._worker.receive())

    def close(self) -> None:
        """End all of them; safe twice."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _nurse(pipe: Pipe, common: Any) -> None:
    torch.set_num_threads(1)
    # that a peer is late or gone is what was planned
    logging.disable(logging.WARNING)
    nurse = os.getpid()
    while True:
        try:
            function, args, nice = pipe.recv()
        except (EOFError, OSError):
            return
        _bury()
        pid = os.fork()
        if pid == 0:
            pipe.close()
            _live(nurse, nice, partial(function, common, *args))
        pipe.send(pid)


def _bury() -> None:
    """Let go of the dead: not earlier, so that each had a pid until its pidfd was open."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _live(nurse: int, nice: int, work: Callable[[], None]) -> None:
    """Work in a forked child, and end without what the parent would do at its end."""
    code = 1
    try:
        die_with(nurse)
        if nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
