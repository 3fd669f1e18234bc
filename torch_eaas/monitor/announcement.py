"""What members tell the monitor: plain values and their JSON forms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch_eaas.config import check_at_least, check_choice
from torch_eaas.errors import ConfigError
from torch_eaas.placement import Holdings, ServerInfo, ServerState

Role = Literal["server", "client"]
"""What a member does."""

Status = Literal["ok", "unknown", "gone"]
"""Answer to a heartbeat: carry on; please join; another life has taken this one's place."""

MAX_COUNTERS = 64
"""Most counters that a member reports."""

MAX_TROUBLE = 256
"""Most characters of a trouble's text."""

COUNTER_PATTERN = "^[a-z][a-z0-9_]{0,62}$"
"""Names of counters; they become names of metrics."""


def instance_text(instance: int) -> str:
    """Return an instance id as 16 hex digits, since JSON numbers end at 53 bits."""
    return f"{instance:016x}"


def clean_counters(counters: Mapping[str, float]) -> dict[str, float]:
    """Return the counters that the monitor takes: well named, finite, the first of too many."""
    named = {
        name: float(value)
        for name, value in counters.items()
        if re.fullmatch(COUNTER_PATTERN, name) and math.isfinite(value)
    }
    return dict(list(named.items())[:MAX_COUNTERS])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that a server serves; all servers of a cluster serve the same one."""

    fingerprint: str
    """Names the checkpoint: config, index and weight storage."""

    layers: tuple[int, ...]
    """The layers that have experts."""

    num_experts: int
    """Experts of each of these layers."""

    def __post_init__(self) -> None:
        check_at_least("num_experts", self.num_experts, 1)
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError(f"layers must be ascending and not negative, got {self.layers}")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "fingerprint": self.fingerprint,
            "layers": list(self.layers),
            "num_experts": self.num_experts,
        }

    def stranger_in(self, holdings: Holdings) -> tuple[int, int] | None:
        """Return the first (layer, expert) of the holdings that the model does not have."""
        for layer, experts in holdings.items():
            for expert in experts:
                if not 0 <= expert < self.num_experts:
                    return layer, expert
            if experts and layer not in self.layers:
                return layer, experts[0]
        return None


@dataclass(frozen=True, slots=True)
class Known:
    """The newest placement that a member has seen, and the monitor that numbered it."""

    term: int = 0
    version: int = 0
    monitor: int = 0
    """Instance id of that monitor; 0 where the member does not know it."""

    @property
    def order(self) -> tuple[int, int]:
        """Compares with ``Placement.order``."""
        return (self.term, self.version)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        monitor = instance_text(self.monitor)
        return {"term": self.term, "version": self.version, "monitor": monitor}


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a member says of itself; the mappings must not change afterwards."""

    role: Role
    """Server or client."""

    name: str
    """Unique among the servers; several clients may share one."""

    instance: int
    """The 64-bit id of this life of the process."""

    address: str = ""
    """A server's control endpoint; may be empty for a client."""

    holdings: Holdings = field(default_factory=dict)
    """Layer to the sorted ids of the experts that a server holds."""

    model: ModelInfo | None = None
    """The model that a server serves; a standby that holds nothing may leave it out."""

    state: ServerState = "serving"
    """A draining server is asked only while nobody else holds an expert."""

    room: int = 0
    """How many more experts a server would load if it were asked."""

    trouble: str = ""
    """Why it could not load what it was asked to; empty while it can."""

    progress: int = 0
    """Iterations of the serving loop; tells a busy member from one that hangs."""

    counters: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the status page and the metrics, such as ``requests``."""

    def __post_init__(self) -> None:
        check_choice("role", self.role, Role)
        check_choice("state", self.state, ServerState)
        check_at_least("room", self.room, 0)
        if not self.name:
            raise ConfigError("name must not be empty")
        if not 0 < self.instance < 1 << 64:
            raise ConfigError(f"instance must be a 64-bit id above 0, got {self.instance}")
        if self.role == "server" and not self.address:
            raise ConfigError(f"server {self.name} must announce the address of its endpoint")

    @property
    def identity(self) -> tuple[object, ...]:
        """What only a join can tell; the rest travels with heartbeats."""
        return (self.role, self.name, self.instance, self.address, self.model)

    @property
    def num_held(self) -> int:
        """How many (layer, expert) pairs are held."""
        return sum(len(experts) for experts in self.holdings.values())

    def server_info(self) -> ServerInfo:
        """Return the server as placements show it."""
        return ServerInfo(
            name=self.name,
            instance=self.instance,
            address=self.address,
            holdings=self.holdings,
            state=self.state,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the body of a join."""
        return {
            "role": self.role,
            "name": self.name,
            "address": self.address,
            "model": self.model.to_json() if self.model is not None else None,
            "holdings": holdings_json(self.holdings),
            **self.beat_json(),
        }

    def beat_json(self) -> dict[str, Any]:
        """Return the body of a heartbeat without changed holdings."""
        return {
            "instance": instance_text(self.instance),
            "state": self.state,
            "room": self.room,
            "trouble": self.trouble[:MAX_TROUBLE],
            "progress": self.progress,
            "counters": clean_counters(self.counters),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life, and what has changed since the last one."""

    instance: int
    state: ServerState = "serving"
    room: int = 0
    trouble: str = ""
    progress: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    known: Known = Known()
    holdings: Holdings | None = None
    """None where they are as before."""


def holdings_json(holdings: Holdings) -> dict[str, list[int]]:
    """Return holdings as JSON carries them."""
    return {str(layer): list(experts) for layer, experts in holdings.items()}
