"""A monitor, servers and clients as processes, which are killed, stopped and started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from benchmarks.failing_monitor import LEASE_S, FailingMonitor
from benchmarks.failover_roles import ClientRole, Kind, ServerRole, ask, serve
from benchmarks.marks import END, IDLE, RUN, Marks
from benchmarks.nursery import Nursery, Offspring
from benchmarks.schedule import KILL, STOP, Phase
from torch_eaas.errors import PeerTimeout

NICE = 19
"""Processes that are started again leave the cores to those that work."""

WELL_S = 60.0
STRIKE_S = 0.5
"""How long to wait for a server to have a request in hand before it is hit without one."""

STOPS_S = (0.3, 1.3, 1.25 * LEASE_S)
"""Stops are shorter than a request's time, longer than that, and longer than a lease, in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One fault that happened."""

    process: int
    """The server, client or monitor, as a phase counts them."""

    at: float
    """Since when it may have; monotonic, the same for all processes."""

    until: float
    """Until when."""

    in_hand: bool
    """Whether the victim was a server whose experts ran at that moment."""

    stood_still: tuple[float, float] | None = None
    """From when to when it did, if it was stopped and not killed."""


class FailingCluster:
    """Starts everything, and lets it fail when told; a context manager that ends it.

    Args:
        nursery: Forks servers and clients.
        marks: What they share with it.
        kind: What is served.
        num_servers: Servers; each expert has two holders.
        num_clients: Clients.
        ballast_bytes: Memory that server 0 touches beside its experts.
    """

    def __init__(
        self,
        nursery: Nursery,
        marks: Marks,
        kind: Kind,
        *,
        num_servers: int,
        num_clients: int,
        ballast_bytes: int = 0,
    ) -> None:
        self.marks, self.num_servers, self.num_clients = marks, num_servers, num_clients
        self._nursery, self._kind, self._ballast = nursery, kind, ballast_bytes
        self._stops = 0
        self.monitor = FailingMonitor()
        self._servers = [self._start_server(index, 0) for index in range(num_servers)]
        for client in range(num_clients):
            marks.command[client] = IDLE
            for numbers in (marks.done, marks.failed, marks.wrong, marks.busy_s):
                numbers[client] = 0
        self._clients = [self._start_client(index, 0) for index in range(num_clients)]

    def await_well(self) -> None:
        """Wait until the monitor answers and each client has a pair to each server."""
        self.monitor.await_ready()
        self._await(
            lambda: (
                all(pairs == self.num_clients for pairs in self.marks.pairs[: self.num_servers])
                and END not in self.marks.state[: self.num_clients]
            ),
            lambda: (
                f"pairs {self.marks.pairs[:]}, clients {self.marks.state[:]}, wanted "
                f"{self.num_clients} pairs at each server and no client in state {END}"
            ),
        )

    def forward(self, count: int) -> None:
        """Wait until the clients, which run, have made so many forwards more."""
        enough = sum(self.marks.done) + count
        self._await(
            lambda: sum(self.marks.done) >= enough,
            lambda: f"{sum(self.marks.done)} forwards, wanted {enough}",
        )

    def command(self, command: int) -> None:
        """Let all clients run or be idle, and wait until they are."""
        self.marks.command[: self.num_clients] = [command] * self.num_clients
        self._await(
            lambda: set(self.marks.state[: self.num_clients]) == {command},
            lambda: f"clients are in states {self.marks.state[:]}, wanted {command}",
        )

    def play(self, phase: Phase) -> list[Hit]:
        """Do what a phase says; return what happened."""
        hits = []
        for process, what in enumerate(phase):
            if what == KILL:
                hits.append(self._kill(process))
            elif what == STOP:
                hits.append(self._stop(process))
        return hits

    def kill_servers(self) -> list[float]:
        """Kill all servers at once, without starting any; return when each was hit."""
        times = []
        for server in self._servers:
            times.append(time.monotonic())
            server.kill()
        for index, server in enumerate(self._servers):
            server.close()
            self.marks.pairs[index] = -1
        return times

    def start_servers(self) -> None:
        """Start all servers again."""
        self._servers = [self._start_server(index, NICE) for index in range(self.num_servers)]

    def close(self) -> None:
        """End all processes."""
        for offspring in (*self._clients, *self._servers):
            offspring.close()
        self.monitor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _kill(self, process: int) -> Hit:
        """Kill a process and start another in its place."""
        if process < self.num_servers:
            self._await_request(process)
        at = time.monotonic()
        self._process(process).close()
        until = time.monotonic()
        # who was killed while its experts ran has left its mark
        hit = Hit(process=process, at=at, until=until, in_hand=self._is_in_hand(process))
        client = process - self.num_servers
        if client < 0:
            self._servers[process] = self._start_server(process, NICE)
        elif client < self.num_clients:
            self._clients[client] = self._start_client(client, NICE)
        else:
            self.monitor.restart(NICE)
        return hit

    def _stop(self, process: int) -> Hit:
        """Let a process stand still for a while; the monitor always for longer than a lease."""
        is_monitor = process == self.num_servers + self.num_clients
        seconds = STOPS_S[-1] if is_monitor else STOPS_S[self._stops % len(STOPS_S)]
        self._stops += not is_monitor
        if process < self.num_servers:
            self._await_request(process)
        at = time.monotonic()
        victim = self._process(process)
        victim.stop()
        since, in_hand = time.monotonic(), self._is_in_hand(process)
        time.sleep(seconds)
        until = time.monotonic()
        victim.resume()
        return Hit(process=process, at=at, until=since, in_hand=in_hand, stood_still=(since, until))

    def _process(self, number: int) -> Offspring:
        """Return a process by its place in a phase."""
        return [*self._servers, *self._clients, self.monitor.process][number]

    def _is_in_hand(self, process: int) -> bool:
        return process < self.num_servers and bool(self.marks.in_hand[process])

    def _await_request(self, server: int) -> None:
        end = time.monotonic() + STRIKE_S
        while not self.marks.in_hand[server] and time.monotonic() < end:
            time.sleep(5e-5)

    def _start_server(self, index: int, nice: int) -> Offspring:
        self.marks.pairs[index] = -1
        role = ServerRole(
            kind=self._kind,
            index=index,
            count=self.num_servers,
            monitor=self.monitor.url,
            ballast_bytes=self._ballast if index == 0 else 0,
        )
        return self._nursery.start(serve, role, nice=nice)

    def _start_client(self, index: int, nice: int) -> Offspring:
        self.marks.state[index] = END
        role = ClientRole(kind=self._kind, index=index, monitor=self.monitor.url)
        return self._nursery.start(ask, role, nice=nice)

    def _await(self, ready: Callable[[], Any], told: Callable[[], str]) -> None:
        end = time.monotonic() + WELL_S
        while not ready():
            if time.monotonic() > end:
                raise PeerTimeout(f"the cluster was not as it must be in {WELL_S:g} s: {told()}")
            time.sleep(0.002)


def run_clients(cluster: FailingCluster, work: Callable[[], None]) -> tuple[int, float]:
    """Let the clients run during ``work``; return their forwards and the seconds these took."""
    marks = cluster.marks
    forwards, busy_s = sum(marks.done), sum(marks.busy_s)
    cluster.command(RUN)
    work()
    cluster.command(IDLE)
    return sum(marks.done) - forwards, sum(marks.busy_s) - busy_s
