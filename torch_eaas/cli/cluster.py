"""A monitor and some servers as child processes of this one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch_eaas.cli.children import Child
from torch_eaas.config import Storage

START_TIMEOUT = timedelta(seconds=120)
"""How long a child may take to start: a busy machine imports torch in many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Which servers to start."""

    checkpoint: Path
    """Where their experts come from."""

    servers: int
    """How many."""

    copies: int
    """How many of them hold each expert."""

    storage: Storage
    """How they keep weights."""

    log_level: str
    """What the children tell on stderr."""


class Cluster:
    """Starts everything at once, from the caller's thread, with which it ends. Close it.

    Args:
        config: Which servers.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._servers: dict[str, Child] = {}
        with ExitStack() as stack:
            log = ["--log-level", config.log_level]
            monitor = stack.enter_context(Child("the monitor", ["monitor", *log]))
            self.url = str(monitor.ready(START_TIMEOUT)["url"])
            for index in range(config.servers):
                name = f"server-{index}"
                arguments = ["server", *self._arguments(index), *log]
                self._servers[name] = stack.enter_context(Child(name, arguments))
            self._stack = stack.pop_all()

    def ready(self) -> dict[str, dict[str, Any]]:
        """Wait until all servers serve; return their ready lines by name. Call it once."""
        return {name: child.ready(START_TIMEOUT) for name, child in self._servers.items()}

    def kill(self, name: str) -> None:
        """Send SIGKILL to a server."""
        self._servers[name].kill()

    def close(self) -> None:
        """End all of them at once; nobody loses by it."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _arguments(self, index: int) -> list[str]:
        config = self.config
        return [
            str(config.checkpoint),
            f"--monitor={self.url}",
            f"--share={index}/{config.servers}",
            f"--copies={config.copies}",
            f"--storage={config.storage}",
        ]
