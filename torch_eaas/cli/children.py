"""Processes of this command line that another one starts, and that never outlive it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

from torch_eaas.cli.environment import child_environment
from torch_eaas.errors import PeerGone, PeerTimeout, TransportError

_LONGEST_LINE = 1 << 24
_END_S = 5.0
"""How long the kernel may take to end a process: it tears down the memory first."""


class Child:
    """``torch-eaas VERB ...`` as a child process; its stderr is this process's. Close it.

    Start it from a thread that lives as long as it may: when that thread ends, so does the child.

    Args:
        name: What messages call it.
        arguments: The verb and its options.
    """

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_eaas", "--parent", str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ready(self, timeout: timedelta) -> dict[str, Any]:
        """Return the ready line that it prints once it serves; ask once.

        Raises:
            PeerGone: It ended before.
            PeerTimeout: It took too long.
            TransportError: What it printed is no ready line.
        """
        line = self._read_line(time.monotonic() + timeout.total_seconds(), timeout)
        try:
            value = json.loads(line)
        except ValueError as error:
            raise TransportError(f"{self.name}: no ready line, but {line[:80]!r}") from error
        if not isinstance(value, dict) or "ready" not in value:
            raise TransportError(f"{self.name}: no ready line, but {line[:80]!r}")
        return value

    def kill(self) -> None:
        """Send SIGKILL and return at once."""
        self._process.kill()

    def close(self) -> None:
        """Kill it and wait for its end; safe twice."""
        self._process.kill()
        # one that is stuck in the kernel ends there: the signal waits for it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _end(self) -> str:
        """Return how it ended; one that only closed its stdout may still run."""
        try:
            return f"ended with {self._process.wait(_END_S)}"
        except subprocess.TimeoutExpired:
            return "closed its stdout"

    def _read_line(self, deadline: float, timeout: timedelta) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        line = b""
        while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(1000 * left):
                raise PeerTimeout(f"{self.name} was not ready in {timeout.total_seconds():g} s")
            piece = os.read(fd, 1 << 16)
            if not piece:
                raise PeerGone(f"{self.name} {self._end()} before it was ready; see above")
            line += piece
        return line
