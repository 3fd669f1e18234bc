"""What a cluster file's processes are to a supervisor: a command each, and how often."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from torch_eaas.cli.cluster_file import (
    MONITOR,
    ClientSpec,
    ClusterFile,
    MonitorSpec,
    ServerSpec,
)
from torch_eaas.cli.restarts import RestartPolicy

Kind = Literal["monitor", "server", "client"]
"""In the order in which they are started; they are ended in the opposite order."""

_EAAS = (sys.executable, "-m", "torch_eaas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process that is started, watched, and perhaps started again."""

    name: str
    """Heads its lines and stands in messages; unique."""

    kind: Kind
    """Monitors and servers print a ready line; a client serves nobody and is just run."""

    command: Callable[[str], Sequence[str]]
    """Program and arguments, given the monitor's URL; it is empty before the first one is known."""

    policy: RestartPolicy
    """What happens when it fails."""

    start_timeout: timedelta = timedelta(seconds=120)
    """How long it may take to its ready line."""

    folder: Path | None = None
    """Where it runs; by default where this process does."""


def roles_of(file: ClusterFile) -> list[Role]:
    """Return the monitor, the servers and the clients of a file."""
    roles = [_monitor(file.monitor, file)]
    roles += [_server(spec, file) for spec in file.servers]
    return roles + [_client(spec, file) for spec in file.clients]


def _monitor(spec: MonitorSpec, file: ClusterFile) -> Role:
    certificate: tuple[str, ...] = ()
    if file.access.tls_certificate is not None:
        paths = (file.access.tls_certificate, file.access.tls_key)
        certificate = (f"--tls-certificate={paths[0]}", f"--tls-key={paths[1]}")

    def command(url: str) -> Sequence[str]:
        # members look for it where it was: a restart keeps the port that the first start got
        port = urlsplit(url).port if url else spec.port
        options = (f"--host={spec.host}", f"--port={port}")
        return (*_EAAS, "monitor", *options, *certificate)

    return Role(
        name=MONITOR,
        kind="monitor",
        command=command,
        policy=RestartPolicy(max_restarts=spec.max_restarts),
        start_timeout=file.start_timeout,
    )


def _server(spec: ServerSpec, file: ClusterFile) -> Role:
    index, count = spec.share
    which = [f"--share={index}/{count}", f"--copies={spec.copies}"]
    if spec.standby:
        which = ["--standby"]
    elif spec.experts is not None:
        which = [f"--experts={','.join(map(str, spec.experts))}"]
    if spec.room:
        which.append(f"--room={spec.room}")
    if file.access.tls_authority is not None:
        which.append(f"--tls-authority={file.access.tls_authority}")
    options = (
        *which,
        f"--name={spec.name}",
        f"--storage={spec.storage}",
        f"--transport={spec.transport}",
        f"--max-rows={spec.max_rows}",
        f"--threads={spec.threads}",
    )
    return Role(
        name=spec.name,
        kind="server",
        command=lambda url: (*_EAAS, "server", str(file.checkpoint), f"--monitor={url}", *options),
        policy=RestartPolicy(max_restarts=spec.max_restarts),
        start_timeout=file.start_timeout,
    )


def _client(spec: ClientSpec, file: ClusterFile) -> Role:
    known = {
        "{python}": sys.executable,
        "{checkpoint}": str(file.checkpoint.resolve()),
        "{name}": spec.name,
    }
    return Role(
        name=spec.name,
        kind="client",
        command=lambda url: [_filled(part, {**known, "{monitor}": url}) for part in spec.command],
        policy=RestartPolicy(max_restarts=spec.max_restarts),
        folder=file.path.resolve().parent,
    )


def _filled(text: str, known: Mapping[str, str]) -> str:
    # not str.format: other braces are the command's own, those of JSON for example
    for placeholder, value in known.items():
        text = text.replace(placeholder, value)
    return text
