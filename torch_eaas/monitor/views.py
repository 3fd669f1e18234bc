"""JSON forms of the monitor's state, for ``/members``, ``/readyz`` and the status page."""

from __future__ import annotations

from typing import Any

from torch_eaas.monitor.announcement import instance_text
from torch_eaas.monitor.members import Members
from torch_eaas.monitor.roster import Member
from torch_eaas.placement import holdings_from

_NUM_EVENTS = 20


def members_json(members: Members, now: float) -> dict[str, Any]:
    """Return all that the status page shows."""
    term, version = members.placement.order
    return {
        "monitor": instance_text(members.instance),
        "term": term,
        "version": version,
        "waiting": members.waiting,
        "model": members.model.to_json() if members.model is not None else None,
        "servers": [member_json(member, now) for member in members.servers],
        "clients": [member_json(member, now) for member in members.clients],
        "suspects": [member_json(member, now) for member in members.suspects],
        "events": [
            {**event.to_json(), "age": round(now - event.at, 3)}
            for event in members.log.recent(_NUM_EVENTS)
        ],
    }


def member_json(member: Member, now: float) -> dict[str, Any]:
    """Return one member; ages are seconds on the monitor's clock."""
    said = member.announcement
    return {
        "name": said.name,
        "label": member.label,
        "instance": instance_text(said.instance),
        "address": said.address,
        "state": said.state,
        "stuck": member.stuck,
        "experts": said.num_held,
        "room": said.room,
        "age": round(now - member.seen_at, 3),
        "progress": said.progress,
        "progress_age": round(now - member.progress_at, 3),
        "counters": dict(said.counters),
        "known": member.known.to_json(),
    }


def placement_json(members: Members) -> dict[str, Any]:
    """Return the placement, and whose it is."""
    monitor = instance_text(members.instance)
    return {**members.placement.to_json(), "monitor": monitor, "waiting": members.waiting}


def ready_json(members: Members) -> dict[str, Any]:
    """Return whether the cluster can serve, and if not, why: missing experts by layer."""
    missing = holdings_from(members.missing())
    return {
        "ready": members.ready,
        "reason": members.not_ready,
        "missing": {str(layer): list(experts) for layer, experts in missing.items()},
    }
