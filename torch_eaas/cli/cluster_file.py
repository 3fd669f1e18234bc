"""The TOML file of ``torch-eaas launch``: which processes make up a local cluster."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import get_args

from torch_eaas.cli import arguments
from torch_eaas.cli.tables import Table
from torch_eaas.config import Storage
from torch_eaas.errors import ConfigError

MONITOR = "monitor"
"""What the monitor is called; no other process may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSpec:
    """``[monitor]``, which may be left out."""

    host: str
    """Address to bind."""

    port: int
    """Port to bind; 0 for any, which a restart keeps."""

    max_restarts: int
    """Restarts in a row after failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """One server, of ``[[server]]``."""

    name: str
    """Unique in the file."""

    share: tuple[int, int]
    """Index and count of the part of every layer's experts that it holds."""

    copies: int
    """How many of the parts' servers hold each expert."""

    experts: tuple[int, ...] | None
    """The experts of every layer, instead of a share."""

    storage: Storage
    """How it keeps weights."""

    max_rows: int
    """Most (token, expert) rows of one batch."""

    threads: int
    """Threads of the experts."""

    max_restarts: int
    """Restarts in a row after failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSpec:
    """One client, of ``[[client]]``: any command."""

    name: str
    """Unique in the file."""

    command: tuple[str, ...]
    """Program and arguments, with the placeholders as they were written."""

    max_restarts: int
    """Restarts in a row after failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """What a file says, checked."""

    path: Path
    """The file; relative paths in it begin at its folder."""

    checkpoint: Path
    """Whose experts the servers hold."""

    start_timeout: timedelta
    """How long monitor and servers may take until they serve."""

    monitor: MonitorSpec
    """The monitor."""

    servers: tuple[ServerSpec, ...]
    """The servers, at least one."""

    clients: tuple[ClientSpec, ...]
    """The clients, if any."""


def read_cluster_file(path: Path) -> ClusterFile:
    """Read and check a file.

    Raises:
        ConfigError: It cannot be read, or says something that cannot be; names table and key.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is no TOML: {error}") from error
    top = Table(path, "", values)
    checkpoint = path.parent / top.text("checkpoint")
    if not checkpoint.is_dir():
        raise top.error("checkpoint", "a directory", str(checkpoint))
    start_timeout = timedelta(seconds=top.seconds("start_timeout", 120.0))
    monitor = _monitor(top.table("monitor"))
    servers = [spec for table in top.tables("server") for spec in _servers(table)]
    clients = [spec for table in top.tables("client") for spec in _clients(table)]
    top.finish()
    if not servers:
        raise ConfigError(f"{path}: no [[server]]: a cluster has at least one")
    names = [MONITOR, *(server.name for server in servers), *(client.name for client in clients)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: two processes are called {name}; give each table a name")
    return ClusterFile(
        path=path,
        checkpoint=checkpoint,
        start_timeout=start_timeout,
        monitor=monitor,
        servers=tuple(servers),
        clients=tuple(clients),
    )


def _monitor(table: Table) -> MonitorSpec:
    spec = MonitorSpec(
        host=table.text("host", "127.0.0.1"),
        port=table.integer("port", 0, 0, 65535),
        max_restarts=table.integer("max_restarts", 5, 0),
    )
    table.finish()
    return spec


def _servers(table: Table) -> list[ServerSpec]:
    """Return the servers of one table: alike, or with a share each if it names no experts."""
    name, count = table.name("server"), table.integer("count", 1, 1)
    share = table.parsed("share", arguments.share)
    experts = table.parsed("experts", arguments.expert_ids)
    copies = table.integer("copies", 1, 1)
    if experts is not None and share is not None:
        raise table.error("experts", "left out where there is a share", list(experts))
    if experts is not None and copies != 1:
        raise table.error("copies", "left out where there are experts", copies)
    parts = share[1] if share is not None else count
    if experts is None and copies > parts:
        raise table.error("copies", f"at most the number of shares ({parts})", copies)
    storage: Storage = table.one_of("storage", get_args(Storage), "fp32")
    max_rows, threads = table.integer("max_rows", 2048, 1), table.integer("threads", 1, 1)
    max_restarts = table.integer("max_restarts", 5, 0)
    table.finish()
    return [
        ServerSpec(
            name=each,
            share=share or (index, count),
            copies=copies,
            experts=experts,
            storage=storage,
            max_rows=max_rows,
            threads=threads,
            max_restarts=max_restarts,
        )
        for index, each in enumerate(_names(name, count))
    ]


def _clients(table: Table) -> list[ClientSpec]:
    name, count = table.name("client"), table.integer("count", 1, 1)
    command = table.strings("command")
    max_restarts = table.integer("max_restarts", 0, 0)
    table.finish()
    return [
        ClientSpec(name=each, command=command, max_restarts=max_restarts)
        for each in _names(name, count)
    ]


def _names(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}-{index}" for index in range(count)]
