"""The monitor's HTTP routes."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from torch_eaas.access import Gate
from torch_eaas.errors import ConfigError
from torch_eaas.monitor.announcement import Status, holdings_json, instance_text
from torch_eaas.monitor.members import Members
from torch_eaas.monitor.metrics import new_registry
from torch_eaas.monitor.page import CONTENT_SECURITY_POLICY, render_page
from torch_eaas.monitor.rendezvous import Rendezvous
from torch_eaas.monitor.schemas import HeartbeatBody, JoinBody, LeaveBody, RendezvousBody
from torch_eaas.monitor.service import Service
from torch_eaas.monitor.views import members_json, placement_json, ready_json

_NO_STORE = {"Cache-Control": "no-store"}

_RendezvousName = Annotated[str, Path(pattern="^[A-Za-z0-9._-]{1,128}$")]


def member_routes(service: Service) -> APIRouter:
    """Return the routes that members call."""
    router = APIRouter()
    config = service.members.config

    @router.post("/join")
    async def join(body: JoinBody) -> dict[str, Any]:
        try:
            service.join(body)
        except ConfigError as error:
            raise HTTPException(409, str(error)) from error
        return {
            **_reply(service.members, "ok", body.instance),
            "heartbeat": config.heartbeat.total_seconds(),
            "lease": config.lease.total_seconds(),
        }

    @router.post("/heartbeat")
    async def heartbeat(body: HeartbeatBody) -> dict[str, Any]:
        try:
            status = service.heartbeat(body.value())
        except ConfigError as error:
            raise HTTPException(409, str(error)) from error
        return _reply(service.members, status, body.instance)

    @router.post("/leave")
    async def leave(body: LeaveBody) -> dict[str, bool]:
        return {"left": service.leave(int(body.instance, 16))}

    return router


def rendezvous_routes(clock: Callable[[], float]) -> APIRouter:
    """Return the routes of the meeting place for processes that must start together."""
    router = APIRouter()
    place = Rendezvous()

    @router.put("/rendezvous/{name}")
    async def put_rendezvous(name: _RendezvousName, body: RendezvousBody) -> dict[str, bool]:
        try:
            place.put(name, base64.b64decode(body.data), clock())
        except ConfigError as error:
            raise HTTPException(409, str(error)) from error
        return {"left": True}

    @router.get("/rendezvous/{name}")
    async def get_rendezvous(name: _RendezvousName) -> JSONResponse:
        data = place.get(name, clock())
        text = None if data is None else base64.b64encode(data).decode()
        return JSONResponse({"data": text}, headers=_NO_STORE)

    return router


def _reply(members: Members, status: Status, instance: str) -> dict[str, Any]:
    """Return what every join and heartbeat is answered with."""
    life = int(instance, 16)
    term, version = members.placement.order
    return {
        "status": status,
        "monitor": instance_text(members.instance),
        "term": term,
        "version": version,
        "load": holdings_json(members.asked_of(life)),
        "pending": members.pending(life),
        "silent": [instance_text(client) for client in members.silent_clients],
    }


def view_routes(service: Service) -> APIRouter:
    """Return the routes that only look."""
    router = APIRouter()
    members = service.members

    @router.get("/members")
    async def view_members() -> dict[str, Any]:
        return members_json(members, service.clock())

    @router.get("/placement")
    async def view_placement() -> dict[str, Any]:
        return placement_json(members)

    @router.get("/healthz")
    async def view_health() -> dict[str, bool]:
        return {"ok": True}

    @router.get("/readyz")
    async def view_ready() -> JSONResponse:
        return JSONResponse(ready_json(members), 200 if members.ready else 503, _NO_STORE)

    @router.get("/")
    async def view_page() -> HTMLResponse:
        html = render_page(members_json(members, service.clock()), ready_json(members))
        headers = {**_NO_STORE, "Content-Security-Policy": CONTENT_SECURITY_POLICY}
        return HTMLResponse(html, headers=headers)

    return router


def stream_routes(service: Service, gate: Gate) -> APIRouter:
    """Return the routes that other machinery reads: metrics and the event stream."""
    router = APIRouter()
    registry = new_registry(service.members, gate)

    @router.get("/metrics")
    async def view_metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/events")
    async def view_events(request: Request) -> StreamingResponse:
        last_id = request.headers.get("last-event-id", "")
        return StreamingResponse(
            service.stream(last_id), media_type="text/event-stream", headers=_NO_STORE
        )

    return router
