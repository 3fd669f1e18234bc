"""The server's end of the protocol: poll all slots, merge what is ready, run it, reply."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from typing_extensions import override

from torch_eaas.comm.auto import transport_of
from torch_eaas.comm.quiet import Quiet
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ServerConfig
from torch_eaas.monitor.announcement import ModelInfo
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.server_base import Membership, Server
from torch_eaas.server_batch import BatchRunner, Experts
from torch_eaas.server_loading import Load
from torch_eaas.server_pairs import SLOW_SCAN_S, ServerPair
from torch_eaas.server_path import DataPath

LONGEST_QUIET_S = 0.002
"""A server that has answered sleeps through the shortest gap of lately before it looks for the next
request, but not for longer: the next one may come sooner."""

LONGEST_WAIT_S = SLOW_SCAN_S
"""Nobody rings for the windows that are looked at seldom."""


class HostPath(DataPath[ServerPair]):
    """Reads windows, runs experts and writes answers in the serving thread.

    Args:
        experts: What it runs.
        config: The server's options.
        transport: How to wait for a word.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        experts: Experts,
        config: ServerConfig,
        transport: Transport,
        clock: Callable[[], float],
    ) -> None:
        self._runner = BatchRunner(experts, config.max_rows, clock, config.name)
        self._transport = transport
        self._clock = clock
        self._writing = threading.Lock()
        self._gaps = Quiet(LONGEST_QUIET_S)
        self._idle_since = clock()
        self.pairs: tuple[ServerPair, ...] = ()
        self.agreed: PairSpec | None = None
        self.counters = self._runner.counters
        self.version = 0
        self.last_answer = clock()
        self.progress = 0

    @property
    @override
    def make_pair(self) -> Callable[..., ServerPair]:
        return ServerPair

    @override
    def step(self) -> int:
        # held while windows are read and written: see settle
        with self._writing:
            pairs = self.pairs
            now = self._clock()
            ready = False
            for pair in pairs:
                ready |= pair.scan(now)
            self._runner.version = self.version
            answered = self._runner.step(pairs) if ready else 0
        self.progress += 1
        if answered:
            self._gaps.add(now - self.last_answer)
            self.last_answer = self._idle_since = self._clock()
            self._transport.ring()
        return answered

    @override
    def rest(self, has_stopped: Callable[[], bool]) -> None:
        beyond = self._clock() - self._idle_since - self._gaps.seconds
        self._transport.wait(
            lambda: has_stopped() or self._has_work(),
            LONGEST_WAIT_S,
            max(0.0, beyond),
            quiet=max(0.0, -beyond),
        )

    @override
    def settle(self) -> None:
        # the batch that may still have been writing is done
        with self._writing:
            pass

    @override
    def finish(self) -> None:
        self._runner.draining = True
        self.step()

    def _has_work(self) -> bool:
        now = self._clock()
        return any(pair.scan(now) for pair in self.pairs)


class ExpertServer(Server[ServerPair]):
    """Runs experts for any number of clients; keeps nothing that a client would miss.

    Args:
        experts: The experts to run; they may be added to and removed from while it serves.
        config: The server's options.
        transport: How clients reach it: a transport, the name of one, or ``"auto"``; the default
            is shared memory on this host.
        monitor: URL of the monitor to join, if any.
        model: The whole model that these experts belong to, told to the monitor.
        load: Adds experts that the monitor asks for, at most ``config.room`` of them. It is called
            in a thread of its own; what it raises is logged, counted and told to the monitor.
        instance: This life's id; by default a random one.
        clock: Seconds, monotonic; tests plan it.

    Example::

        with ExpertServer(pool).serve_in_background() as server:
            client = Client(ClientConfig(hidden_size=64, top_k=2), servers=[server.address])
    """

    def __init__(
        self,
        experts: Experts,
        config: ServerConfig | None = None,
        *,
        transport: Transport | str | None = None,
        monitor: str | None = None,
        model: ModelInfo | None = None,
        load: Load | None = None,
        instance: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or ServerConfig()
        transport = transport_of(transport or "shared_memory")
        super().__init__(
            experts,
            HostPath(experts, config, transport, clock),
            config,
            transport=transport,
            member=Membership(monitor=monitor, model=model, load=load, instance=instance),
            clock=clock,
        )
