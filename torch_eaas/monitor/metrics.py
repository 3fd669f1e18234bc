"""The monitor's metrics, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from torch_eaas.access import Gate
from torch_eaas.monitor.members import Members


class MembersCollector(Collector):
    """Reads the state of the members when it is asked for."""

    def __init__(self, members: Members, gate: Gate) -> None:
        self._members = members
        self._gate = gate

    @override
    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the monitor, then the counters of its members."""
        members = self._members
        by_role = GaugeMetricFamily("torch_eaas_members", "Live members.", labels=["role"])
        by_role.add_metric(["server"], len(members.servers))
        by_role.add_metric(["client"], len(members.clients))
        up = GaugeMetricFamily(
            "torch_eaas_server_up", "1 for a live server, 0 for an expired one.", labels=["server"]
        )
        for alive, group in ((1, members.servers), (0, members.suspects)):
            for name in {member.announcement.name: None for member in group}:
                up.add_metric([name], alive)
        stuck = GaugeMetricFamily(
            "torch_eaas_server_stuck",
            "1 for a live server that makes no progress.",
            labels=["server"],
        )
        for member in members.servers:
            stuck.add_metric([member.announcement.name], member.stuck)
        term, version = members.placement.order
        return [
            by_role,
            up,
            stuck,
            CounterMetricFamily(
                "torch_eaas_leases_expired", "Members that fell silent.", members.leases_expired
            ),
            CounterMetricFamily(
                "torch_eaas_access_denied", "Requests without the token.", self._gate.denied
            ),
            GaugeMetricFamily("torch_eaas_placement_term", "The monitor's term.", term),
            GaugeMetricFamily("torch_eaas_placement_version", "Version of the placement.", version),
            GaugeMetricFamily(
                "torch_eaas_experts_missing",
                "Experts without a live holder.",
                len(members.missing()),
            ),
            *self._counters(),
        ]

    def _counters(self) -> Iterable[Metric]:
        families: dict[str, UnknownMetricFamily] = {}
        for member in [*self._members.servers, *self._members.clients]:
            for name, value in member.announcement.counters.items():
                if name not in families:
                    families[name] = UnknownMetricFamily(
                        f"torch_eaas_member_{name}", "As the members report it.", labels=["member"]
                    )
                families[name].add_metric([member.label], value)
        return families.values()


def new_registry(members: Members, gate: Gate) -> CollectorRegistry:
    """Return a registry that holds these members' metrics and nothing else."""
    registry = CollectorRegistry()
    registry.register(MembersCollector(members, gate))
    return registry
