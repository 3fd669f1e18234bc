"""What the monitor accepts over HTTP: shapes and bounds of request bodies."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from torch_eaas.monitor.announcement import (
    COUNTER_PATTERN,
    MAX_COUNTERS,
    MAX_TROUBLE,
    Announcement,
    Heartbeat,
    Known,
    ModelInfo,
    Role,
)
from torch_eaas.monitor.rendezvous import MAX_BYTES
from torch_eaas.placement import ServerState

MAX_BODY_BYTES = 1 << 20
"""Largest body; the holdings of all experts of DeepSeek-R1 take 60 KB."""

InstanceText = Annotated[str, StringConstraints(pattern="^[0-9a-f]{16}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,128}$")]
Address = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{0,512}$")]
Trouble = Annotated[str, StringConstraints(max_length=MAX_TROUBLE)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Index = Annotated[int, Field(ge=0, lt=1 << 16)]
HoldingsBody = Annotated[
    dict[Index, Annotated[list[Index], Field(max_length=1 << 16)]], Field(max_length=1 << 12)
]
Base64Text = Annotated[
    str,
    StringConstraints(
        pattern="^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
        max_length=4 * -(-MAX_BYTES // 3),
    ),
]
Counters = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=COUNTER_PATTERN)],
        Annotated[float, Field(allow_inf_nan=False)],
    ],
    Field(max_length=MAX_COUNTERS),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class KnownBody(_Body):
    """The newest placement that a member has seen; zeros for none."""

    term: Count = 0
    version: Count = 0
    monitor: InstanceText = "0" * 16

    def value(self) -> Known:
        """Return the plain value."""
        return Known(self.term, self.version, int(self.monitor, 16))


class ModelBody(_Body):
    """The model that a server serves."""

    fingerprint: Annotated[str, StringConstraints(max_length=256)]
    layers: Annotated[list[Index], Field(min_length=1, max_length=1 << 12)]
    num_experts: Annotated[int, Field(ge=1, le=1 << 16)]

    def value(self) -> ModelInfo:
        """Return the plain value."""
        return ModelInfo(
            fingerprint=self.fingerprint, layers=tuple(self.layers), num_experts=self.num_experts
        )


class HeartbeatBody(_Body):
    """Body of POST /heartbeat."""

    instance: InstanceText
    state: ServerState = "serving"
    room: Count = 0
    trouble: Trouble = ""
    progress: Count = 0
    counters: Counters = {}
    known: KnownBody = KnownBody()
    holdings: HoldingsBody | None = None

    def value(self) -> Heartbeat:
        """Return the plain value."""
        return Heartbeat(
            instance=int(self.instance, 16),
            state=self.state,
            room=self.room,
            trouble=self.trouble,
            progress=self.progress,
            counters=self.counters,
            known=self.known.value(),
            holdings=_holdings(self.holdings) if self.holdings is not None else None,
        )


class JoinBody(_Body):
    """Body of POST /join."""

    role: Role
    name: Name
    instance: InstanceText
    address: Address = ""
    model: ModelBody | None = None
    holdings: HoldingsBody = {}
    state: ServerState = "serving"
    room: Count = 0
    trouble: Trouble = ""
    progress: Count = 0
    counters: Counters = {}
    known: KnownBody = KnownBody()
    takeover: bool = True

    def value(self) -> Announcement:
        """Return the plain value; ConfigError if its parts contradict each other."""
        return Announcement(
            role=self.role,
            name=self.name,
            instance=int(self.instance, 16),
            address=self.address,
            holdings=_holdings(self.holdings),
            model=self.model.value() if self.model is not None else None,
            state=self.state,
            room=self.room,
            trouble=self.trouble,
            progress=self.progress,
            counters=self.counters,
        )


class LeaveBody(_Body):
    """Body of POST /leave."""

    instance: InstanceText


class RendezvousBody(_Body):
    """Body of PUT /rendezvous/{name}."""

    data: Base64Text


def _holdings(body: dict[int, list[int]]) -> dict[int, tuple[int, ...]]:
    return {layer: tuple(sorted(set(body[layer]))) for layer in sorted(body)}
