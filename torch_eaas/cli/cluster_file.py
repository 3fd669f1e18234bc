"""The TOML file of ``torch-eaas launch``: which processes make up a local cluster."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, get_args

from torch_eaas.cli import arguments
from torch_eaas.cli.tables import Table
from torch_eaas.comm.auto import AUTO, BETWEEN_PROCESSES
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
class AccessSpec:
    """``[access]``, which may be left out: who may ask, and how the monitor is verified."""

    token_file: Path | None
    """Holds the cluster's token."""

    tls_certificate: Path | None
    """The monitor's certificate chain."""

    tls_key: Path | None
    """The certificate's key."""

    tls_authority: Path | None
    """What the servers verify the monitor's certificate against."""


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
    """The experts of every layer, instead of a share; none for a standby."""

    standby: bool
    """Whether it holds nothing until the monitor asks it to load."""

    room: int
    """Most experts to load when the monitor asks; 0 is none, and for a standby all."""

    storage: Storage
    """How it keeps weights."""

    transport: str
    """How clients reach it."""

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

    access: AccessSpec
    """The token and the certificates, if any."""

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
    access = _access(top.table("access"))
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
        access=access,
        monitor=monitor,
        servers=tuple(servers),
        clients=tuple(clients),
    )


def _access(table: Table) -> AccessSpec:
    spec = AccessSpec(
        token_file=table.file("token_file"),
        tls_certificate=table.file("tls_certificate"),
        tls_key=table.file("tls_key"),
        tls_authority=table.file("tls_authority"),
    )
    table.finish()
    if spec.tls_certificate is None and spec.tls_key is not None:
        raise table.error("tls_certificate", "given with tls_key: they go together", None)
    if spec.tls_key is None and spec.tls_certificate is not None:
        raise table.error("tls_key", "given with tls_certificate: they go together", None)
    if spec.tls_authority is not None and spec.tls_certificate is None:
        expected = "left out without a tls_certificate: the monitor then speaks plain HTTP"
        raise table.error("tls_authority", expected, str(spec.tls_authority))
    return spec


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
    which = _which(table, count)
    storage: Storage = table.one_of("storage", get_args(Storage), "fp32")
    transport = table.one_of("transport", BETWEEN_PROCESSES, AUTO)
    max_rows, threads = table.integer("max_rows", 2048, 1), table.integer("threads", 1, 1)
    room, max_restarts = table.integer("room", 0, 0), table.integer("max_restarts", 5, 0)
    table.finish()
    return [
        ServerSpec(
            name=each,
            share=which.share or (index, count),
            copies=which.copies,
            experts=which.experts,
            standby=which.standby,
            room=room,
            storage=storage,
            transport=transport,
            max_rows=max_rows,
            threads=threads,
            max_restarts=max_restarts,
        )
        for index, each in enumerate(_names(name, count))
    ]


class _Which(NamedTuple):
    """Which experts the servers of one table hold."""

    share: tuple[int, int] | None
    experts: tuple[int, ...] | None
    copies: int
    standby: bool


def _which(table: Table, count: int) -> _Which:
    share = table.parsed("share", arguments.share)
    experts = table.parsed("experts", arguments.expert_ids)
    copies, standby = table.integer("copies", 1, 1), table.flag("standby")
    if standby and (share is not None or experts is not None):
        raise table.error("standby", "left out where there is a share or experts", standby)
    if experts is not None and share is not None:
        raise table.error("experts", "left out where there is a share", list(experts))
    if copies != 1 and (standby or experts is not None):
        where = "standby is true" if standby else "there are experts"
        raise table.error("copies", f"left out where {where}", copies)
    parts = share[1] if share is not None else count
    if copies > parts:
        raise table.error("copies", f"at most the number of shares ({parts})", copies)
    return _Which(share, () if standby else experts, copies, standby)


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
