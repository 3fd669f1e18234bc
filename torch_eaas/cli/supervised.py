"""One process under a supervisor: its lines, its ready line, its end."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from typing import IO, Any

from torch_eaas.cli import parent
from torch_eaas.cli.environment import child_environment
from torch_eaas.cli.roles import Role

logger = logging.getLogger(__name__)

_PIECE = 1 << 16
_PIECES = 16
_LONGEST_LINE = 1 << 20
_LAST_LINES = 10
_KILL_SECONDS = 5.0


class Supervised:
    """A role's process, which dies with this one. Nothing here blocks but ``close``.

    Its stderr goes to this process's, each line with the role's name before it; so does what a
    monitor or a server prints besides its ready line. A client's stdout is this process's.

    Start it from a thread that lives as long as it may: when that thread ends, so does the process.

    Args:
        role: What to run.
        url: The monitor's, for the command.
    """

    def __init__(self, role: Role, url: str) -> None:
        self.role = role
        self.ready: dict[str, Any] | None = None
        """The ready line, once it came."""
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        """The last lines of its stderr."""
        is_client = role.kind == "client"
        # isolated and without site: the wrapper is replaced by the command within milliseconds
        wrapper = [sys.executable, "-I", "-S", parent.__file__, str(os.getpid())]
        self._process = subprocess.Popen(
            [*wrapper, *role.command(url)],
            stdin=subprocess.DEVNULL,
            stdout=None if is_client else subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if is_client else child_environment(),
            cwd=role.folder,
            # a terminal's interrupt reaches the supervisor alone, which ends all in their order
            process_group=0,
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._out = _Lines(self._process.stdout)
        self._err = _Lines(self._process.stderr)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def fds(self) -> list[int]:
        """Descriptors that turn readable when there is something to ``pump`` or it has ended."""
        return [self._pidfd, *self._out.fds, *self._err.fds]

    def pump(self) -> None:
        """Pass on what it wrote."""
        for line in self._out.read():
            self._take(line)
        for line in self._err.read():
            self.last.append(line)
            self._show(line)

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL and return at once."""
        self._process.kill()

    def close(self) -> None:
        """Kill it if it runs, wait for its end, and pass on its last lines; safe twice."""
        if self._pidfd < 0:
            return
        self._process.kill()
        try:
            self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            # it is stuck in the kernel; the signal waits for it there
            logger.warning("%s (pid %d) is killed and does not end", self.role.name, self.pid)
        self.pump()
        # not until the pipes' end: a process that it started may hold them for longer
        for line in (*self._out.close(), *self._err.close()):
            self.last.append(line)
            self._show(line)
        os.close(self._pidfd)
        self._pidfd = -1

    def _take(self, line: str) -> None:
        if self.ready is None:
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict) and "ready" in value:
                self.ready = value
                return
        self._show(line)

    def _show(self, line: str) -> None:
        try:
            sys.stderr.write(f"[{self.role.name}] {line}\n")
            sys.stderr.flush()
        except OSError:
            # whoever read it has left; that is no reason to end anybody
            pass


def ending(code: int) -> str:
    """Return in words how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class _Lines:
    """The lines of a pipe, as far as they have come; without a pipe there are none."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        self._pipe = pipe
        self._rest = b""
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)

    @property
    def fds(self) -> list[int]:
        return [] if self._pipe is None else [self._pipe.fileno()]

    def read(self) -> list[str]:
        lines: list[bytes] = []
        # bounded: one who writes without end must not keep the supervisor from the others
        for _ in range(_PIECES):
            if self._pipe is None:
                break
            try:
                piece = os.read(self._pipe.fileno(), _PIECE)
            except BlockingIOError:
                break
            if not piece:
                self._pipe.close()
                self._pipe = None
            *more, self._rest = (self._rest + piece).split(b"\n")
            lines += more
            if len(self._rest) > _LONGEST_LINE:
                lines.append(self._rest)
                self._rest = b""
        return [_text(line) for line in lines]

    def close(self) -> list[str]:
        """Close the pipe and return the line that has no end."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
