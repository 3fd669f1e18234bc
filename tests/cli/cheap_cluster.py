"""A supervisor over processes that take milliseconds to start; run it with a folder and roles.

Each process writes what happens to it into ``FOLDER/NAME``, a word and its pid a line, and the end
of each into ``FOLDER/ends``.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from launched import Launched, wait_for

from torch_eaas.cli.restarts import RestartPolicy
from torch_eaas.cli.roles import Kind, Role
from torch_eaas.cli.supervisor import Supervisor
from torch_eaas.errors import EaasError

PRELUDE = """
import json, os, signal, sys, time
folder, name, url = sys.argv[1:]
def note(word, file=name):
    with open(f"{folder}/{file}", "a") as out:
        out.write(f"{word} {os.getpid()}\\n")
def starts():
    return open(f"{folder}/{name}").read().count("start ")
def ready():
    told = {"url": url or f"http://first-of-{os.getpid()}"} if name == "monitor" else {}
    print(json.dumps({"ready": name, **told}), flush=True)
def end(*_):
    time.sleep(0.1)
    note(name, "ends")
    sys.exit(0)
def serve():
    while True: signal.pause()
signal.signal(signal.SIGTERM, end)
note("start")
"""
SERVE = "ready(); serve()"


@dataclass(frozen=True, kw_only=True)
class Cheap:
    """One role."""

    name: str
    kind: Kind
    code: str = SERVE
    max_restarts: int = 5
    start_timeout: float = 60.0


MONITOR = Cheap(name="monitor", kind="monitor")
SERVERS = tuple(Cheap(name=f"server-{i}", kind="server") for i in range(2))
CLIENTS = tuple(Cheap(name=f"client-{i}", kind="client", code="serve()") for i in range(2))


class CheapCluster(Launched):
    """The supervisor as a process of its own."""

    def __init__(self, folder: Path, *roles: Cheap) -> None:
        self.folder = folder
        told = json.dumps([asdict(role) for role in roles])
        super().__init__(sys.executable, __file__, str(folder), told, PYTHONPATH=":".join(sys.path))

    def lines(self, name: str) -> list[str]:
        """Return the words and pids that a process wrote."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def started(self, name: str, times: int = 1) -> int:
        """Wait until a role was started so often; return the newest pid."""
        wait_for(lambda: len(self.lines(name)) >= times or self.process.poll() is not None, 30)
        assert len(self.lines(name)) == times, self.err
        return int(self.lines(name)[-1].split()[1])

    def pids(self, *roles: Cheap) -> list[int]:
        """Wait until roles were started; return their pids."""
        return [self.started(role.name) for role in roles]

    def ended(self) -> list[str]:
        """Return the names of those that ended as they were asked, in that order."""
        return [line.split()[0] for line in self.lines("ends")]


def _role(cheap: Cheap, folder: str) -> Role:
    def command(url: str) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", PRELUDE + cheap.code, folder, cheap.name, url]

    return Role(
        name=cheap.name,
        kind=cheap.kind,
        command=command,
        policy=RestartPolicy(
            max_restarts=cheap.max_restarts, first_delay=timedelta(milliseconds=10)
        ),
        start_timeout=timedelta(seconds=cheap.start_timeout),
    )


def _main(folder: str, roles: str) -> int:
    logging.basicConfig(level="INFO", format="%(message)s")
    try:
        return Supervisor([_role(Cheap(**each), folder) for each in json.loads(roles)]).run()
    except EaasError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
