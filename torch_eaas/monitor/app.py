"""The monitor as an HTTP application, and the two ways to run it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Self

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from torch_eaas.access import Gate
from torch_eaas.config import MonitorConfig
from torch_eaas.errors import PeerTimeout, TransportError
from torch_eaas.monitor.guard import TokenGuard
from torch_eaas.monitor.members import Members
from torch_eaas.monitor.routes import (
    member_routes,
    rendezvous_routes,
    stream_routes,
    view_routes,
)
from torch_eaas.monitor.schemas import MAX_BODY_BYTES
from torch_eaas.monitor.service import Service
from torch_eaas.monitor.serving import BodyLimit, MonitorServer, open_socket, url_of

logger = logging.getLogger(__name__)

_START_SECONDS = 30.0
_STOP_SECONDS = 10.0


def create_app(members: Members, clock: Callable[[], float] = time.monotonic) -> FastAPI:
    """Return the application over some members; its ``state.service`` steps them.

    Args:
        members: The state, stepped by this application alone from now on.
        clock: Monotonic seconds.
    """
    # who listens takes a stream that is silent for a lease for broken
    service = Service(members, clock, members.config.lease.total_seconds() / 3)
    gate = Gate(members.config.access, "the monitor", clock)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ticking = asyncio.create_task(service.run())
        yield
        service.bell.stop()
        ticking.cancel()

    app = FastAPI(
        title="torch_eaas monitor",
        lifespan=lifespan,
        openapi_url=None,
        exception_handlers={
            HTTPException: _http_error,
            RequestValidationError: _validation_error,
        },
    )
    app.state.service = service
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    # added last, so it stands before all else
    app.add_middleware(TokenGuard, gate=gate)
    for router in (
        member_routes(service),
        rendezvous_routes(clock),
        view_routes(service),
        stream_routes(service, gate),
    ):
        app.include_router(router)
    return app


def run(config: MonitorConfig) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    Once requests are answered, one line on stdout names the URL:
    ``{"ready": "monitor", "url": "http://127.0.0.1:PORT", "pid": PID}``.

    Raises:
        ConfigError: The address cannot be bound.
        TransportError: The application did not start.
    """
    sock = open_socket(config)
    line = json.dumps({"ready": "monitor", "url": url_of(sock, config), "pid": os.getpid()})
    server = _new_server(config, lambda: print(line, flush=True))
    asyncio.run(server.serve([sock]))
    return 0


class MonitorHandle:
    """A monitor in a daemon thread of this process, for tests and tutorials. Close it.

    Args:
        config: What to run; port 0 takes a free one.

    Raises:
        ConfigError: The address cannot be bound.
        TransportError: It did not start.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self._sock = open_socket(config)
        self.url = url_of(self._sock, config)
        self._settled = threading.Event()
        self._error: Exception | None = None
        self._server = _new_server(config, self._settled.set)
        self._thread = threading.Thread(target=self._serve, name="eaas-monitor", daemon=True)
        self._thread.start()
        if not self._settled.wait(_START_SECONDS):
            self._server.should_exit = True
            raise PeerTimeout(f"the monitor at {self.url} did not start in {_START_SECONDS:g} s")
        if not self._server.started:
            raise TransportError(f"the monitor at {self.url} did not start") from self._error

    def close(self) -> None:
        """Stop it and free its port; safe twice."""
        self._server.should_exit = True
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise PeerTimeout(f"the monitor at {self.url} did not stop in {_STOP_SECONDS:g} s")

    def _serve(self) -> None:
        try:
            asyncio.run(self._server.serve([self._sock]))
        except Exception as error:
            logger.exception("the monitor at %s failed", self.url)
            self._error = error
        finally:
            self._sock.close()
            self._settled.set()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def serve_in_background(config: MonitorConfig) -> MonitorHandle:
    """Start a monitor in this process and return its handle once it answers, or raise."""
    return MonitorHandle(config)


def _new_server(config: MonitorConfig, on_started: Callable[[], None]) -> MonitorServer:
    # a random instance id above zero, which stands for no monitor
    members = Members(config, secrets.randbelow((1 << 64) - 1) + 1, time.monotonic())
    app = create_app(members)
    return MonitorServer(config, app, on_started, app.state.service.bell.stop)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3]]
    return JSONResponse({"error": "; ".join(faults)[:1000]}, 422)
