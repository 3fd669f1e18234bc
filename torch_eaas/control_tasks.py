"""A client's control calls, which may take seconds where a server hangs: one at a time a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class ControlTasks:
    """Runs tasks, at most one for each server."""

    def __init__(self) -> None:
        self._busy: set[int] = set()

    def run(self, in_thread: bool, instance: int, task: Callable[[], None]) -> None:
        """Run a task of one server, in a thread of its own or here, unless one is under way."""
        if instance in self._busy:
            return
        self._busy.add(instance)

        def run() -> None:
            try:
                task()
            finally:
                self._busy.discard(instance)

        if in_thread:
            threading.Thread(target=run, name="eaas-handshake", daemon=True).start()
        else:
            run()

    def wait(self, seconds: float) -> None:
        """Wait until no task runs, at most so long."""
        deadline = time.monotonic() + seconds
        while self._busy and time.monotonic() < deadline:
            time.sleep(0.005)
