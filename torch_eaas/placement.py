"""Which servers hold which (layer, expert): immutable snapshots, and the shares they come from.

Pure functions and values; no torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from torch_eaas.errors import ConfigError

Holdings = Mapping[int, tuple[int, ...]]
"""Layer to the sorted ids of the experts that one server holds there."""

ServerState = Literal["serving", "draining"]
"""What a server says of itself."""

PlacedState = Literal["serving", "draining", "suspect"]
"""What a placement says of a server, the best first; the monitor no longer hears a suspect."""

PLACED_STATES: tuple[PlacedState, ...] = get_args(PlacedState)


def holdings_from(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Return the holdings of a server that holds these (layer, expert) pairs.

    Example:
        ``[(1, 3), (1, 0), (2, 5)]`` gives ``{1: (0, 3), 2: (5,)}``.
    """
    layers: dict[int, set[int]] = {}
    for layer, expert in pairs:
        layers.setdefault(layer, set()).add(expert)
    return {layer: tuple(sorted(layers[layer])) for layer in sorted(layers)}


def pairs_of(holdings: Holdings) -> Iterator[tuple[int, int]]:
    """Return the (layer, expert) pairs of some holdings, one after the other."""
    return ((layer, expert) for layer, experts in holdings.items() for expert in experts)


def share(
    layers: Sequence[int], num_experts: int, index: int, count: int, *, copies: int = 1
) -> dict[int, tuple[int, ...]]:
    """Return what server ``index`` of ``count`` holds when each expert has ``copies`` holders.

    Experts go round the servers, so no server holds two copies of one expert and any number of
    servers and experts works.

    Example:
        Server 0 of 3 with 4 experts and two copies holds ``(0, 2, 3)`` of each layer.

    Raises:
        ConfigError: ``index`` is not below ``count``, or ``copies`` is not within 1 to ``count``.
    """
    if count < 1 or not 0 <= index < count:
        raise ConfigError(f"a share is index/count with 0 <= index < count, got {index}/{count}")
    if num_experts < 0:
        raise ConfigError(f"num_experts must not be negative, got {num_experts}")
    if not 1 <= copies <= count:
        raise ConfigError(f"copies must be 1 to the number of servers ({count}), got {copies}")
    experts = tuple(e for e in range(num_experts) if (index - e) % count < copies)
    return dict.fromkeys(layers, experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """One server as clients see it."""

    name: str
    """Unique among the servers of a placement."""

    instance: int
    """The 64-bit id of this life of the process."""

    address: str
    """Its control endpoint."""

    holdings: Holdings
    """What it holds."""

    state: PlacedState = "serving"
    """A draining or suspect server is asked only while nobody better holds an expert."""

    @property
    def rank(self) -> int:
        """How gladly it is asked: 0 serving, 1 draining, 2 suspect."""
        return PLACED_STATES.index(self.state)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; the instance id is a hex string, JSON numbers end at 53 bits."""
        return {
            "name": self.name,
            "instance": f"{self.instance:016x}",
            "address": self.address,
            "holdings": {str(layer): list(ids) for layer, ids in self.holdings.items()},
            "state": self.state,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ServerInfo:
        """Return the server that ``to_json`` wrote; ConfigError names a field that is off."""
        try:
            state = data.get("state", "serving")
            if state not in PLACED_STATES:
                raise ValueError(f"state {state!r}")
            instance = int(data["instance"], 16)
            if not 0 <= instance < 1 << 64:
                raise ValueError(f"instance {data['instance']!r} is not a 64-bit id")
            return cls(
                name=str(data["name"]),
                instance=instance,
                address=str(data["address"]),
                holdings={
                    _number(int(layer), "layer"): tuple(
                        sorted({_number(expert, "expert") for expert in ids})
                    )
                    for layer, ids in data["holdings"].items()
                },
                state=state,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"not a server description: {error!r}") from error


@dataclass(frozen=True)
class Placement:
    """Which servers hold which experts, at one moment; never changed, only replaced.

    Args:
        servers: All servers that may be asked, ordered by name.
        version: Grows with each change within a term.
        term: The monitor's term; a placement of a higher term replaces any of a lower one.
    """

    servers: tuple[ServerInfo, ...] = ()
    version: int = 0
    term: int = 0

    def __post_init__(self) -> None:
        names = [server.name for server in self.servers]
        if names != sorted(set(names)):
            raise ConfigError(f"servers must be ordered by name and unique, got {names}")

    @property
    def order(self) -> tuple[int, int]:
        """What two placements are compared by: the newer one has the greater order."""
        return (self.term, self.version)

    @cached_property
    def _holders(self) -> dict[tuple[int, int], tuple[int, ...]]:
        holders: dict[tuple[int, int], list[int]] = {}
        ordered = sorted(range(len(self.servers)), key=lambda i: self.servers[i].rank)
        for i in ordered:
            for layer, experts in self.servers[i].holdings.items():
                for expert in experts:
                    holders.setdefault((layer, expert), []).append(i)
        return {key: tuple(value) for key, value in holders.items()}

    def holders(self, layer: int, expert: int) -> tuple[int, ...]:
        """Return indices into ``servers`` of those that hold an expert, the best state first."""
        return self._holders.get((layer, expert), ())

    def missing(
        self, layers: Iterable[int], num_experts: int, *, worst: PlacedState = "draining"
    ) -> list[tuple[int, int]]:
        """Return the (layer, expert) pairs of a model that no server holds.

        Args:
            layers: The layers with experts.
            num_experts: Experts of each.
            worst: Servers of a worse state than this do not count as holders.
        """
        limit = PLACED_STATES.index(worst)

        def is_held(key: tuple[int, int]) -> bool:
            holders = self._holders.get(key)
            return holders is not None and self.servers[holders[0]].rank <= limit

        keys = [(layer, expert) for layer in layers for expert in range(num_experts)]
        return [key for key in keys if not is_held(key)]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "term": self.term,
            "version": self.version,
            "servers": [server.to_json() for server in self.servers],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Placement:
        """Return the placement that ``to_json`` wrote; ConfigError if it is none."""
        try:
            servers = sorted(
                (ServerInfo.from_json(entry) for entry in data["servers"]), key=lambda s: s.name
            )
            return cls(
                tuple(servers),
                _number(data["version"], "version"),
                _number(data["term"], "term"),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"not a placement: {error!r}") from error


def _number(value: object, name: str) -> int:
    """Return a JSON number that counts something; ValueError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
    return value
