"""``torch-eaas`` in processes of its own, for the tests of this folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch_eaas

ROOT = Path(torch_eaas.__file__).parents[1]
SHAKESPEARE = Path(torch_eaas.__file__).parent / "assets" / "shakespeare"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PYTHON": sys.executable,
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
PATIENCE = 100.0
"""Seconds for what takes one on an idle machine."""


class Launched:
    """A process whose output is collected; killed at the end of a ``with`` or a fixture."""

    def __init__(self, *command: str, **environment: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # close() closes it
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**ENVIRONMENT, **environment},
            cwd=ROOT,
        )
        self.out = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def err(self) -> str:
        # opened anew: the process writes at the offset of the descriptor that it shares with us
        return Path(f"/proc/self/fd/{self._errors.fileno()}").read_text()

    def until(self, text: str) -> str:
        """Wait until stdout has a text; return all of it."""
        wait_for(lambda: text.encode() in self.out or not self._reader.is_alive())
        assert text.encode() in self.out, (self.out, self.err)
        return self.out.decode()

    def ready(self) -> dict[str, Any]:
        """Return the ready line."""
        line = json.loads(self.until("\n").splitlines()[0])
        assert isinstance(line, dict)
        return line

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, timeout: float = PATIENCE) -> int:
        """Wait for the end; return the exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def close(self) -> None:
        self.process.kill()
        self.end()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while piece := os.read(self.process.stdout.fileno(), 1 << 16):
            self.out += piece


def eaas(*arguments: str) -> Launched:
    return Launched(sys.executable, "-m", "torch_eaas", *arguments)


def wait_for(condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
    """Return once a condition holds; fail if that takes too long."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, though perhaps nobody has collected it yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def free_port() -> int:
    """Return a port that was free just now, for a process that starts later."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
