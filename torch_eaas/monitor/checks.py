"""Whether a server fits into the cluster: one cluster serves one model."""

from __future__ import annotations

from collections.abc import Iterable

from torch_eaas.errors import ConfigError
from torch_eaas.monitor.announcement import Announcement, ModelInfo


def check_holdings(server: Announcement) -> None:
    """Raise ConfigError if a server holds what its model does not have."""
    if not server.num_held:
        return
    if server.model is None:
        raise ConfigError(f"server {server.name} holds experts but announces no model")
    stranger = server.model.stranger_in(server.holdings)
    if stranger is not None:
        raise ConfigError(
            f"server {server.name} holds layer {stranger[0]}, expert {stranger[1]}, which its "
            f"model ({describe(server.model)}) does not have"
        )


def check_same_model(server: Announcement, others: Iterable[Announcement]) -> None:
    """Raise ConfigError if a server's model is not that of the other live servers."""
    if server.model is None:
        return
    for other in others:
        # an older life of the same server gives way
        if other.model is None or other.name == server.name or other.model == server.model:
            continue
        raise ConfigError(
            f"server {server.name} serves {describe(server.model)}, but the live server "
            f"{other.name} serves {describe(other.model)}; one cluster serves one model, so "
            f"start {server.name} on that one or give it another monitor"
        )


def describe(model: ModelInfo) -> str:
    """Return a model in words."""
    layers = f"layers {model.layers[0]} to {model.layers[-1]} ({len(model.layers)})"
    return f"model {model.fingerprint!r}, {layers}, {model.num_experts} experts"
