"""Lets only those callers through to the monitor's routes who show the token."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from torch_eaas.access import DENIED, Gate

OPEN_PATH = "/healthz"
"""The one path that needs no token: it says that the process lives, and nothing else."""


class TokenGuard:
    """Answers 401 to requests without ``Authorization: Bearer TOKEN``, before routes see them.

    Args:
        app: The application behind it.
        gate: Knows the token.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan" or scope["path"] == OPEN_PATH or self._admits(scope):
            await self._app(scope, receive, send)
            return
        answer = JSONResponse({"error": DENIED}, 401, {"WWW-Authenticate": "Bearer"})
        await answer(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        host = (scope.get("client") or ("unknown",))[0]
        return self._gate.admits(_bearer(scope), f"{host}, {scope['path'][:80]!r}")


def _bearer(scope: Scope) -> str | None:
    """Return the token that a request shows, if it shows exactly one."""
    values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    return token.strip().decode("latin-1") if scheme.lower() == b"bearer" else None
