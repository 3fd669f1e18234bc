"""A client's control plane: learns of servers, and keeps a pair open to each, off the data path."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Generic

import numpy as np

from torch_eaas.client_pairs import C
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig
from torch_eaas.connections import Connections
from torch_eaas.directory import Directory
from torch_eaas.errors import ExpertUnavailable

MAINTAIN_S = 0.05
"""How often the background thread looks after the pairs."""

CLOSE_S = 1.0
"""How long ``stop`` waits for that thread."""

logger = logging.getLogger(__name__)


class PairKeeper(Generic[C]):
    """Keeps the pairs of one client open, in a thread of its own or whenever it is asked.

    Args:
        config: The client's options.
        instance: The client's instance id.
        make: Makes an open pair of its two windows.
        servers: Control addresses of servers, if there is no monitor.
        monitor: URL of a monitor that says which servers there are.
        transport: How servers are reached.
        clock: Seconds, monotonic.
        background: Keep pairs open from a thread; without it, ``maintain`` is called.
        counters: The client's counters, told to the monitor.
    """

    def __init__(
        self,
        config: ClientConfig,
        instance: int,
        make: Callable[..., C],
        *,
        servers: Sequence[str],
        monitor: str | None,
        transport: Transport,
        clock: Callable[[], float],
        background: bool,
        counters: Callable[[], dict[str, int]],
    ) -> None:
        self.connections = Connections(config, instance, transport, clock, make)
        self.directory = Directory(
            self.connections,
            transport,
            servers=servers,
            monitor=monitor,
            config=config,
            instance=instance,
            counters=counters,
        )
        self.stopped = threading.Event()
        """Set once the client closes."""
        self._name = config.name
        self._clock = clock
        self._pid = os.getpid()
        self._background = background
        self._thread: threading.Thread | None = None
        self.directory.refresh()
        self.connections.maintain(in_threads=background)
        if background:
            self._thread = threading.Thread(target=self._keep, name="eaas-pairs", daemon=True)
            self._thread.start()

    def wait_ready(self, layers: Sequence[int], num_experts: int, timeout: timedelta) -> None:
        """Wait until every expert of these layers has a server with an open pair.

        Raises:
            ExpertUnavailable: One has none when ``timeout`` is over; names it.
        """
        deadline = self._clock() + timeout.total_seconds()
        self.connections.wanted_until = deadline
        while True:
            missing = self._missing(layers, num_experts)
            if missing is None:
                return
            if self._clock() > deadline:
                raise ExpertUnavailable(*missing, (), self.connections.why_missing())
            time.sleep(0.01)

    def maintain(self) -> None:
        """Open, re-open and close pairs now."""
        self.directory.tend(is_wanted=self._clock() < self.connections.wanted_until)
        self.connections.maintain(in_threads=self._background)

    def stop(self) -> bool:
        """End the thread; return False if that is done, or another process's."""
        if self.stopped.is_set() or os.getpid() != self._pid:
            return False
        self.stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
        return True

    def close(self) -> None:
        """End all pairs and leave the monitor, after ``stop``."""
        self.connections.close()
        self.directory.close()

    def _missing(self, layers: Sequence[int], num_experts: int) -> tuple[int, int] | None:
        """Return the first (layer, expert) that no open server holds."""
        every_E = np.arange(num_experts)
        for layer in layers:
            servers_E = self.connections.routes(layer, num_experts).choose(every_E)
            if (servers_E < 0).any():
                return layer, int(np.flatnonzero(servers_E < 0)[0])
        return None

    def _keep(self) -> None:
        while not self.stopped.wait(MAINTAIN_S):
            try:
                self.maintain()
            except Exception:
                # this thread must outlive whatever a peer sends
                logger.exception("client %s: keeping pairs failed", self._name)
