"""The server's end of the protocol: poll all slots, merge what is ready, run it, reply."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self

from torch_eaas.comm.auto import transport_of
from torch_eaas.comm.quiet import Quiet
from torch_eaas.comm.transport import Listener, Transport
from torch_eaas.config import ServerConfig
from torch_eaas.errors import ConfigError
from torch_eaas.monitor.agent import MonitorAgent
from torch_eaas.monitor.announcement import Announcement, ModelInfo
from torch_eaas.monitor.link import Reply
from torch_eaas.placement import Placement
from torch_eaas.server_batch import BatchRunner, Experts
from torch_eaas.server_control import ServerControl
from torch_eaas.server_drain import DrainState
from torch_eaas.server_loading import Load, Loading
from torch_eaas.server_pairs import SLOW_SCAN_S

LONGEST_QUIET_S = 0.002
"""A server that has answered sleeps through the shortest gap of lately before it looks for the next
request, but not for longer: the next one may come sooner."""

LONGEST_WAIT_S = SLOW_SCAN_S
"""Nobody rings for the windows that are looked at seldom."""

logger = logging.getLogger(__name__)


class ExpertServer:
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
        self.config = config or ServerConfig()
        self.experts = experts
        self.instance = instance if instance is not None else secrets.randbits(64) | 1
        self._transport = transport_of(transport or "shared_memory")
        self._clock = clock
        self._model = model
        self._runner = BatchRunner(experts, self.config.max_rows, clock, self.config.name)
        self._control = ServerControl(
            config=self.config,
            instance=self.instance,
            transport=self._transport,
            hidden_size=experts.hidden_size,
            holdings=lambda: experts.holdings,
            counters=self._runner.counters,
            drain=self.drain,
            clock=clock,
        )
        self._listener: Listener = self._transport.listen(self.config.address, self._control)
        self._loading = self._new_loading(load)
        self._monitor = monitor
        self._agent: MonitorAgent | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._left = threading.Event()
        self._serving: threading.Thread | None = None
        self._drain = DrainState(self.config.drain_timeout.total_seconds())
        self._gaps = Quiet(LONGEST_QUIET_S)
        self._last_answer = clock()
        self._iterations = 0

    @property
    def address(self) -> str:
        """The control endpoint, for clients that do without a monitor."""
        return self._listener.address

    @property
    def num_clients(self) -> int:
        """Pairs that are open."""
        return len(self._control.pairs)

    def counters(self) -> dict[str, int]:
        """Return what was served so far: requests, tokens, batches, refused, experts_us."""
        return self._control.numbers()

    def step(self) -> int:
        """Serve one batch of what is ready now, in this thread; return the frames answered."""
        with self._control.writing:
            pairs = self._control.pairs
            now = self._clock()
            ready = False
            for pair in pairs:
                ready |= pair.scan(now)
            answered = self._runner.step(pairs) if ready else 0
        self._iterations += 1
        if answered:
            self._gaps.add(now - self._last_answer)
            self._last_answer = self._clock()
            self._transport.ring()
        return answered

    def serve(self) -> None:
        """Serve in this thread until a drain has ended or ``close`` is called."""
        if self._monitor is not None and self._agent is None:
            self._agent = MonitorAgent(
                self._monitor,
                self._announce,
                self._on_placement,
                on_reply=self._on_reply,
                access=self.config.access,
            )
        idle_since = self._clock()
        self._serving = threading.current_thread()
        try:
            while not self._stop.is_set() and not self._drained():
                if self.step():
                    idle_since = self._clock()
                else:
                    idle = self._clock() - idle_since
                    beyond = idle - self._gaps.seconds
                    self._transport.wait(
                        self._has_work, LONGEST_WAIT_S, max(0.0, beyond), quiet=max(0.0, -beyond)
                    )
        finally:
            self._leave()
            self._left.set()

    def serve_in_background(self) -> Self:
        """Serve in a thread of this process; return this server, which ``close`` ends."""
        if self._thread is not None:
            raise ConfigError(f"server {self.config.name} serves already")
        self._thread = threading.Thread(
            target=self.serve, name=f"eaas-{self.config.name}", daemon=True
        )
        self._thread.start()
        # a thread that is inside torch when the interpreter ends would end the process hard
        atexit.register(self.close)
        return self

    def drain(self) -> None:
        """Leave without hurting anybody: tell the monitor, serve until it is quiet, then end.

        The monitor has what only this server holds loaded elsewhere, if anybody has room, and
        clients that know another holder go there. Returns at once; ``serve`` returns when that is
        done and nobody has asked for a second, or after ``drain_timeout``.
        """
        if self._drain.begin(self._clock()):
            self._control.state = "draining"
            self._loading.stop()
            logger.info("server %s drains", self.config.name)
            self._notify()

    def close(self, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Stop serving and end all pairs; safe twice. Requests under way are not answered.

        Done at exit if it was forgotten; in a forked child it does nothing.
        """
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        self._stop.set()
        self._transport.ring()
        if self._serving is None and self._thread is None:
            self._leave()
        elif self._serving is not threading.current_thread():
            # the serving thread leaves by itself: two must not write into one window
            self._left.wait(timeout.total_seconds())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _new_loading(self, load: Load | None) -> Loading:
        return Loading(
            name=self.config.name,
            load=load,
            room=self.config.room,
            holdings=lambda: self.experts.holdings,
            counters=self._runner.counters,
            notify=self._notify,
        )

    def _has_work(self) -> bool:
        if self._stop.is_set():
            return True
        now = self._clock()
        return any(pair.scan(now) for pair in self._control.pairs)

    def _drained(self) -> bool:
        agent = self._agent
        is_alone = agent is None or agent.is_away
        return self._drain.is_over(self._clock(), self._last_answer, is_alone=is_alone)

    def _leave(self) -> None:
        self._runner.draining = True
        self.step()
        # the clients see the endpoint close, so that they do not wait while the monitor is told
        self._listener.close()
        self._loading.close()
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _notify(self) -> None:
        agent = self._agent
        if agent is not None:
            agent.notify()

    def _announce(self) -> Announcement:
        self._announced = Announcement(
            role="server",
            name=self.config.name,
            instance=self.instance,
            address=self.address,
            holdings=self.experts.holdings,
            model=self._model,
            state=self._control.state,
            room=self._loading.room if self._control.state == "serving" else 0,
            trouble=self._loading.trouble,
            progress=self._iterations,
            counters=self.counters(),
        )
        return self._announced

    def _on_reply(self, reply: Reply) -> None:
        self._control.hear_silent(reply.silent)
        # what it answers was announced by this thread just before
        self._loading.told(self._announced.trouble)
        if self._announced.state == "draining":
            self._drain.hear(reply.pending, self._clock())
        else:
            self._loading.ask(reply.load)

    def _on_placement(self, placement: Placement) -> None:
        self._control.placement = placement
        self._runner.version = placement.version
