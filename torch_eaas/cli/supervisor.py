"""Starts a cluster's processes, starts again what fails, and ends all of them in order."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence

from torch_eaas.cli.restarts import Restarts
from torch_eaas.cli.roles import Kind, Role
from torch_eaas.cli.stop_signals import StopSignals
from torch_eaas.cli.supervised import Supervised, ending
from torch_eaas.errors import PeerGone, PeerTimeout, TransportError

logger = logging.getLogger(__name__)

_GRACE: dict[Kind, float] = {"client": 10.0, "server": 25.0, "monitor": 10.0}
"""Seconds from SIGTERM to SIGKILL, in the order of the end; a server's drain may take 20."""

_LONGEST_WAIT = 3600.0
"""Seconds; a poll takes no endless number of them."""


class Supervisor:
    """Runs roles until a signal comes, every client is done, or a failure is final.

    One thread does all: the processes die with the thread that started them, and nothing here
    blocks on one of them. None is ended but those that it started itself, by their handles.

    Args:
        roles: A monitor first, and what needs its URL. Names are unique.
    """

    def __init__(self, roles: Sequence[Role]) -> None:
        self._posts = [_Post(role) for role in roles]
        self._signals = StopSignals()
        self._url = ""
        self._is_up = False
        self._is_stopping = False

    def run(self) -> int:
        """Run until the end; return the exit code. Call it once, from the main thread.

        0 means that a signal or the clients' success ended it, and all went in order; 1 that
        something had to be killed. One line of JSON on stdout says when clients may come.

        Raises:
            PeerGone: A process ended before it was ready, or once too often; all are ended.
            PeerTimeout: One did not become ready at first.
        """
        with self._signals:
            try:
                self._start_all()
                while not self._is_done():
                    self._turn()
            except _StopAsked:
                logger.info("a signal came: clients end first, then servers, then the monitor")
            finally:
                is_orderly = self._stop()
        return 0 if is_orderly else 1

    def _start_all(self) -> None:
        self._start_kind("monitor")
        monitor = self._posts[0].process
        assert monitor is not None
        self._url = str((monitor.ready or {}).get("url", ""))
        if not self._url:
            raise TransportError(f"{monitor.role.name}: no URL in its ready line, {monitor.ready}")
        self._start_kind("server")
        line = {"ready": "launch", "url": self._url, "pid": os.getpid()}
        print(json.dumps({**line, "pids": {p.role.name: x.pid for p, x in self._running()}}))
        # flushed before a client may write to the same descriptor
        sys.stdout.flush()
        self._is_up = True
        self._start_kind("client")

    def _start_kind(self, kind: Kind) -> None:
        """Start the processes of a kind at once, and wait until all of them serve."""
        posts = [post for post in self._posts if post.role.kind == kind]
        for post in posts:
            self._start(post)
        while not self._is_up and not all(post.serves for post in posts):
            self._turn()

    def _start(self, post: _Post) -> None:
        try:
            post.process = process = Supervised(post.role, self._url)
        except OSError as error:
            raise TransportError(f"{post.role.name} cannot be started: {error}") from error
        post.start_at = None
        now = time.monotonic()
        post.ready_by = now + post.role.start_timeout.total_seconds()
        logger.info("%s is started, pid %d", post.role.name, process.pid)
        if post.role.kind == "client":
            post.set_serving(now)

    def _turn(self, until: float | None = None) -> None:
        """Wait for something to happen, and take note of it.

        Args:
            until: At the end, when to return although nothing did.
        """
        # at the end nothing is due any more: no restart, no ready line
        dues = [until] if self._is_stopping else [post.due for post in self._posts]
        times = [due for due in dues if due is not None]
        poll = select.poll()
        for fd in (self._signals.fd, *(fd for _, x in self._running() for fd in x.fds)):
            poll.register(fd, select.POLLIN)
        wait = min((due - time.monotonic() for due in times), default=_LONGEST_WAIT)
        # rounded up: a wait that ends too early would turn in circles
        poll.poll(1 + int(1000 * min(max(wait, 0.0), _LONGEST_WAIT)))
        self._signals.clear()
        for post, process in list(self._running()):
            self._look_at(post, process)
        if self._is_stopping:
            return
        if self._signals.count:
            raise _StopAsked
        now = time.monotonic()
        for post in self._posts:
            if post.start_at is not None and post.start_at <= now:
                self._start(post)

    def _look_at(self, post: _Post, process: Supervised) -> None:
        # first the code, then the lines: nothing is written after the end
        code = process.poll()
        process.pump()
        if process.ready is not None and not post.serves:
            post.set_serving(time.monotonic())
        if code is not None:
            process.close()
            post.process = None
            self._take_end(post, process, code)
        elif post.is_late(time.monotonic()) and not self._is_stopping:
            late = f"was not ready in {post.role.start_timeout.total_seconds():g} s"
            if not self._is_up:
                raise PeerTimeout(f"{post.role.name} {late}{_last_lines(process)}")
            logger.warning("%s %s and is killed", post.role.name, late)
            process.kill()
            post.ready_by = None

    def _take_end(self, post: _Post, process: Supervised, code: int) -> None:
        name, has_served = post.role.name, post.serves
        post.serves = False
        if self._is_stopping:
            logger.info("%s %s", name, ending(code))
            return
        if not self._is_up:
            when = "" if has_served else " before it was ready"
            raise PeerGone(f"{name} {ending(code)}{when}{_last_lines(process)}")
        if code == 0 and has_served:
            # a client that is done, or a server that somebody drained on purpose
            post.is_done = True
            logger.info("%s ended with exit code 0 and stays so", name)
            return
        post.start_at = post.restarts.failed(now := time.monotonic())
        most = post.role.policy.max_restarts
        if post.start_at is None:
            often = f" after {most} restarts in a row" if most else ""
            raise PeerGone(
                f"{name} {ending(code)}{often} and is not started again "
                f"(max_restarts = {most}){_last_lines(process)}"
            )
        logger.warning(
            "%s %s: restart %d of %d in %.1f s",
            *(name, ending(code), post.restarts.count, most, post.start_at - now),
        )

    def _is_done(self) -> bool:
        """Return whether all clients are done, if there are any, or else everybody."""
        clients = [post for post in self._posts if post.role.kind == "client"]
        return all(post.is_done for post in clients or self._posts)

    def _stop(self) -> bool:
        """End everybody in order, or at once when asked again; return whether all went."""
        self._is_stopping = True
        # the signal that asked for the end has been heard; any further one means at once
        heard = min(self._signals.count, 1)
        is_orderly = True
        try:
            for kind in _GRACE:
                is_orderly &= self._end(kind, heard)
        finally:
            for _, process in list(self._running()):
                process.close()
        return is_orderly

    def _end(self, kind: Kind, heard: int) -> bool:
        """Ask the processes of a kind to end; return whether they did so in time."""
        until = time.monotonic() + _GRACE[kind]
        for _, process in self._running(kind):
            process.terminate()
        while any(self._running(kind)):
            if self._signals.count > heard or time.monotonic() >= until:
                names = ", ".join(post.role.name for post, _ in self._running(kind))
                logger.warning("%s: killed before the end that SIGTERM asked for", names)
                break
            self._turn(until)
        left = list(self._running(kind))
        for post, process in left:
            process.close()
            post.process = None
        return not left

    def _running(self, kind: Kind | None = None) -> Iterator[tuple[_Post, Supervised]]:
        for post in self._posts:
            if post.process is not None and kind in (None, post.role.kind):
                yield post, post.process


class _Post:
    """What the supervisor knows of one role."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.restarts = Restarts(role.policy)
        self.process: Supervised | None = None
        self.serves = False
        self.is_done = False
        self.start_at: float | None = None
        self.ready_by: float | None = None

    @property
    def due(self) -> float | None:
        """When something happens to it by itself, if ever."""
        if self.process is None:
            return self.start_at
        return None if self.serves else self.ready_by

    def is_late(self, now: float) -> bool:
        return not self.serves and self.ready_by is not None and self.ready_by <= now

    def set_serving(self, now: float) -> None:
        self.serves = True
        self.restarts.served(now)


class _StopAsked(Exception):
    """A signal asks for the end."""


def _last_lines(process: Supervised) -> str:
    lines = "".join(f"\n  {line}" for line in process.last)
    return f"; the end of its stderr:{lines}" if lines else "; it wrote nothing to stderr"
