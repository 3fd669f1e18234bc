"""Sizes and options of clients, servers and the monitor, checked once where they are built."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

from torch_eaas.access import OPEN, Access
from torch_eaas.errors import ConfigError

WireDtype = Literal["fp32", "bf16", "fp16", "fp8"]
"""Number formats of hidden states on the wire; ``fp8`` is e4m3, with a scale for each 128."""

ReplyDtype = Literal["fp32", "bf16"]
"""Number formats of the answers' rows."""

Combine = Literal["partial", "exact"]
"""``partial``: servers send one weighted sum per token. ``exact``: one row per (token, expert)."""

Storage = Literal["fp32", "bf16", "fp8"]
"""How a server keeps its weights; ``fp8`` is e4m3 with block scales."""

HEARTBEAT = timedelta(seconds=0.5)
"""How often a member tells the monitor that it lives."""

LEASE = timedelta(seconds=5)
"""How long a silent member still counts as alive."""


def check_choice(name: str, value: str, choices: object) -> None:
    """Raise ConfigError unless ``value`` is one of a Literal's ``choices``."""
    if value not in get_args(choices):
        raise ConfigError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise ConfigError unless ``value`` is an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_positive(name: str, value: timedelta) -> None:
    """Raise ConfigError unless ``value`` is a duration above zero."""
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ConfigError(f"{name} must be a timedelta above zero, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What a client asks of its servers, and how long it waits for them."""

    hidden_size: int
    """Width D of a token's hidden state."""

    top_k: int
    """Experts per token, K."""

    name: str = "client"
    """How messages, metrics and the monitor call this client."""

    max_tokens: int = 128
    """Most tokens in one request; a larger batch is split into several requests, but on the device
    path, where it is refused."""

    max_micro_batches: int = 3
    """Most dispatches that may be under way at once. Each pair has one slot more."""

    wire_dtype: WireDtype = "fp32"
    """Format of hidden states that travel to a server; ``fp32`` loses nothing of any input, and
    ``fp8`` all but 4 significant bits of each number."""

    reply_dtype: ReplyDtype = "fp32"
    """Format of the answers' rows."""

    combine: Combine = "partial"
    """Who adds up a token's experts: the servers (``partial``) or the client (``exact``)."""

    fingerprint: str = ""
    """The model that servers must serve, ``model`` or ``model:storage``; empty: the first met."""

    request_timeout: timedelta = timedelta(seconds=1)
    """One layer from dispatch to combine, failover included."""

    first_request_timeout: timedelta = timedelta(seconds=60)
    """The same while a pair has never answered: the server may still warm up."""

    hedge_after: timedelta | None = None
    """When a request that is not answered goes to another holder too; by default after three times
    the p99 of the pair's requests of like size, but not before 5 ms."""

    recovery_timeout: timedelta = timedelta(seconds=30)
    """How long a layer waits for a holder of an expert whose holders are all dead, leaving, or
    late by more than ``request_timeout``."""

    graph_wait: timedelta = timedelta(milliseconds=20)
    """On the device path, how long one wait on the device lasts: there is no hedging within a
    captured step, so this is what a server that hangs or dies costs, once a step."""

    on_missing: Literal["raise", "drop"] = "raise"
    """What then happens: ``ExpertUnavailable``, or the token's other experts make up for it."""

    detect_anomalies: bool = False
    """Whether NaN and Inf raise ``AnomalyError``, which names layer and token."""

    access: Access = OPEN
    """The token that servers and the monitor are shown, and what verifies them."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("name must not be empty")
        for name in ("hidden_size", "top_k", "max_tokens", "max_micro_batches"):
            check_at_least(name, getattr(self, name), 1)
        check_choice("wire_dtype", self.wire_dtype, WireDtype)
        check_choice("reply_dtype", self.reply_dtype, ReplyDtype)
        check_choice("combine", self.combine, Combine)
        check_choice("on_missing", self.on_missing, Literal["raise", "drop"])
        durations = ("request_timeout", "first_request_timeout", "recovery_timeout", "graph_wait")
        for name in durations:
            check_positive(name, getattr(self, name))
        if self.hedge_after is not None:
            check_positive("hedge_after", self.hedge_after)

    @property
    def slots(self) -> int:
        """Slots of one pair: one for each micro-batch, and one for a request given up."""
        return self.max_micro_batches + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How a server presents itself and how much it takes at once."""

    name: str = "server"
    """How messages, metrics and the monitor call this server."""

    address: str = ""
    """Control endpoint: ``unix:/path``, ``unix:@name`` (no file), ``loopback:name``; empty: any of
    this machine. ``tcp://HOST:PORT`` where the transport crosses hosts: clients call that host,
    port 0 takes a free one, and with a certificate it speaks TLS and is called ``tls://HOST:PORT``."""

    max_rows: int = 2048
    """Most (token, expert) rows of one merged batch; one request always fits."""

    max_pairs: int = 64
    """Most clients at once; one more is refused."""

    fingerprint: str = ""
    """What the weights are, ``model:storage``; a client that names another model is refused."""

    room: int = 0
    """Most experts that it loads when the monitor asks, beside those that it begins with."""

    drain_timeout: timedelta = timedelta(seconds=20)
    """How long a drain may take before the server leaves all the same."""

    access: Access = OPEN
    """The token that clients must show, a must where other machines reach the control endpoint, and
    that the monitor is shown; the endpoint's certificate."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("name must not be empty")
        check_at_least("max_rows", self.max_rows, 1)
        check_at_least("max_pairs", self.max_pairs, 1)
        check_at_least("room", self.room, 0)
        check_positive("drain_timeout", self.drain_timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Where the monitor listens and how long a silent member counts as alive."""

    host: str = "127.0.0.1"
    """Address to bind; anything but loopback must be asked for."""

    port: int = 0
    """Port to bind; 0 takes a free one, which the ready line names."""

    lease: timedelta = LEASE
    """How long a member may be silent."""

    heartbeat: timedelta = HEARTBEAT
    """How often members are asked to report."""

    load_timeout: timedelta = timedelta(seconds=60)
    """How long a server may load nothing of what it was asked to before another is asked."""

    start_grace: timedelta = timedelta(seconds=30)
    """How long experts that were never served may be missing before a server is asked to load
    them: while a cluster starts, their own servers are still on the way."""

    access: Access = OPEN
    """The token that callers must show, and the certificate; a token is a must off loopback."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host must not be empty; 0.0.0.0 binds every interface")
        check_at_least("port", self.port, 0)
        if self.port > 65535:
            raise ConfigError(f"port must be 0 to 65535, got {self.port}")
        check_positive("lease", self.lease)
        check_positive("heartbeat", self.heartbeat)
        check_positive("load_timeout", self.load_timeout)
        check_positive("start_grace", self.start_grace)
        if self.lease < 3 * self.heartbeat:
            raise ConfigError(
                f"lease must be at least three heartbeats, got lease {self.lease} "
                f"and heartbeat {self.heartbeat}"
            )
