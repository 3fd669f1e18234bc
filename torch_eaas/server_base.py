"""What every expert server does beside answering: endpoint, monitor, loading, drain, the end."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, Protocol, Self

from torch_eaas.comm.transport import Listener, Transport
from torch_eaas.config import ServerConfig
from torch_eaas.errors import ConfigError
from torch_eaas.monitor.agent import MonitorAgent
from torch_eaas.monitor.announcement import Announcement, ModelInfo
from torch_eaas.monitor.link import Reply
from torch_eaas.placement import Holdings, Placement
from torch_eaas.server_control import ServerControl
from torch_eaas.server_drain import DrainState
from torch_eaas.server_loading import Load, Loading
from torch_eaas.server_path import DataPath, P

logger = logging.getLogger(__name__)


class Held(Protocol):
    """The experts of a server, as far as others are told of them."""

    @property
    def hidden_size(self) -> int:
        """Width of a token."""
        ...

    @property
    def holdings(self) -> Holdings:
        """Layer to the ids of the experts held."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """How a server belongs to a cluster."""

    monitor: str | None = None
    """URL of the monitor to join, if any."""

    model: ModelInfo | None = None
    """The whole model that its experts belong to, told to the monitor."""

    load: Load | None = None
    """Adds experts that the monitor asks for; see ``ExpertServer``."""

    instance: int | None = None
    """This life's id; None: a random one."""


class Server(Generic[P]):
    """Answers control calls, is a member of the monitor, and leaves without hurting anybody.

    ``ExpertServer`` and ``DeviceServer`` are this with a data path of their own.

    Args:
        experts: What it holds.
        path: What answers requests.
        config: The server's options.
        transport: How clients reach it.
        member: Its place in a cluster.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        experts: Held,
        path: DataPath[P],
        config: ServerConfig,
        *,
        transport: Transport,
        member: Membership,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.experts = experts
        self.instance = secrets.randbits(64) | 1 if member.instance is None else member.instance
        self._path = path
        self._transport = transport
        self._clock = clock
        self._model = member.model
        self._control = ServerControl(
            config=config,
            instance=self.instance,
            transport=transport,
            hidden_size=experts.hidden_size,
            holdings=lambda: experts.holdings,
            path=path,
            drain=self.drain,
            clock=clock,
        )
        self._listener: Listener = transport.listen(config.address, self._control, config.access)
        self._loading = self._new_loading(member.load)
        self._monitor = member.monitor
        self._agent: MonitorAgent | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._left = threading.Event()
        self._serving: threading.Thread | None = None
        self._drain = DrainState(config.drain_timeout.total_seconds())

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
        """Serve one batch of what is ready now, in this thread; return the requests answered."""
        return self._path.step()

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
        self._serving = threading.current_thread()
        try:
            while not self._stop.is_set() and not self._drained():
                if not self.step():
                    self._path.rest(self._stop.is_set)
        finally:
            try:
                self._leave()
            finally:
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
            counters=self._path.counters,
            notify=self._notify,
        )

    def _drained(self) -> bool:
        agent = self._agent
        is_alone = agent is None or agent.is_away
        return self._drain.is_over(self._clock(), self._path.last_answer, is_alone=is_alone)

    def _leave(self) -> None:
        # all of it, in this order, also if the device has failed
        with ExitStack() as stack:
            agent, self._agent = self._agent, None
            if agent is not None:
                stack.callback(agent.close)
            stack.callback(self._loading.close)
            # the clients see the endpoint close, so that they do not wait while the monitor is told
            stack.callback(self._listener.close)
            stack.callback(self._path.finish)

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
            progress=self._path.progress,
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
        self._path.version = placement.version
