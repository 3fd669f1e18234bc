"""One member's HTTP calls to the monitor, and how their failures are called here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import httpx

from torch_eaas.access import OPEN, Access
from torch_eaas.config import HEARTBEAT, LEASE
from torch_eaas.errors import (
    AccessDenied,
    ConfigError,
    PeerGone,
    PeerTimeout,
    RequestRefused,
    TransportError,
)
from torch_eaas.monitor.tls import verifier
from torch_eaas.placement import Holdings, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the monitor answers to a join or a heartbeat."""

    status: str
    """See ``announcement.Status``."""

    order: tuple[int, int]
    """Term and version of the monitor's placement."""

    heartbeat: float
    """Seconds between heartbeats; told at the join only."""

    lease: float
    """Seconds that a member may be silent; told at the join only."""

    load: Holdings = field(default_factory=dict)
    """What the member is asked to load, repeated until it holds that."""

    pending: int = 0
    """Experts of a draining server for which another holder is to be expected."""

    silent: frozenset[int] = frozenset()
    """Clients, by instance, whose lease has expired lately."""


class MonitorLink:
    """Calls a monitor, from any thread. The owner closes it.

    Args:
        url: Such as ``http://127.0.0.1:8500``.
        timeout: Bounds each phase of a call: connecting, sending, waiting for the answer.
        access: The token to show, and what verifies the monitor's certificate.

    Raises:
        ConfigError: The URL is none, or its certificate could not be verified.
    """

    def __init__(self, url: str, timeout: timedelta, access: Access = OPEN) -> None:
        self.url = url.rstrip("/")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"a monitor's URL is http://HOST:PORT, got {url!r}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"a monitor's URL is http://HOST:PORT, got {url!r}")
        # proxies and .netrc are for the outside world
        self._http = httpx.Client(
            base_url=self.url,
            timeout=timeout.total_seconds(),
            trust_env=False,
            verify=verifier(parsed, access),
            headers={"Authorization": f"Bearer {access.token}"} if access.token else None,
        )

    def report(self, path: str, body: dict[str, Any]) -> Reply:
        """Send a join or a heartbeat."""
        data = self.call("POST", path, body)
        try:
            return Reply(
                status=str(data["status"]),
                order=(int(data["term"]), int(data["version"])),
                heartbeat=float(data.get("heartbeat", HEARTBEAT.total_seconds())),
                lease=float(data.get("lease", LEASE.total_seconds())),
                load={
                    int(layer): tuple(int(expert) for expert in ids)
                    for layer, ids in data.get("load", {}).items()
                },
                pending=int(data.get("pending", 0)),
                silent=frozenset(int(client, 16) for client in data.get("silent", [])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TransportError(f"{self.url}{path} is no monitor: {error!r}") from error

    def placement(self, timeout: timedelta | None = None) -> tuple[Placement, int]:
        """Return the monitor's placement, and its instance id."""
        data = self.call("GET", "/placement", timeout=timeout)
        try:
            return Placement.from_json(data), int(data["monitor"], 16)
        except (KeyError, TypeError, ValueError) as error:
            raise TransportError(f"{self.url}/placement shows none: {error!r}") from error

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: timedelta | None = None,
    ) -> dict[str, Any]:
        """Return the JSON object that answers a call.

        Raises:
            PeerTimeout: No answer came in time.
            PeerGone: The monitor cannot be reached.
            AccessDenied: It asks for another token.
            RequestRefused: It answered with an error; the text is its own.
            TransportError: What answers is no monitor, or one that fails.
        """
        what = f"monitor {self.url}: {method} {path}"
        limit = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout.total_seconds()
        try:
            answer = self._http.request(method, path, json=body, timeout=limit)
            data = answer.json()
        except httpx.TimeoutException as error:
            raise PeerTimeout(f"{what}: no answer in time ({type(error).__name__})") from error
        except (httpx.HTTPError, RuntimeError) as error:
            # httpx raises RuntimeError for a call on a client that was closed meanwhile
            hint = "; --tls-authority names what verifies it" if "CERTIF" in str(error) else ""
            raise PeerGone(f"{what}: {error}{hint}") from error
        except ValueError as error:
            raise TransportError(f"{what}: status {answer.status_code}, no JSON") from error
        if not isinstance(data, dict) or answer.status_code >= 500:
            raise TransportError(f"{what}: status {answer.status_code}, not a monitor's answer")
        if answer.status_code == 401:
            raise AccessDenied(f"{what}: {data.get('error', 401)}")
        if answer.status_code >= 400:
            raise RequestRefused(f"{what}: {data.get('error', answer.status_code)}")
        return data

    @contextlib.contextmanager
    def events(
        self, last_id: str, silence: float, trace: Callable[[str, dict[str, Any]], None]
    ) -> Iterator[Iterator[bytes]]:
        """Open the event stream, whose bytes come as the monitor sends them.

        What fails is raised as httpx calls it.

        Args:
            last_id: The last event heard, or nothing.
            silence: Seconds after which a read is given up.
            trace: Told of each step of the connection, as httpcore calls it.

        Raises:
            TransportError: The monitor answers with something else.
        """
        limit = httpx.Timeout(self._http.timeout.connect, read=silence)
        headers = {"Last-Event-ID": last_id} if last_id else {}
        with self._http.stream(
            "GET", "/events", headers=headers, timeout=limit, extensions={"trace": trace}
        ) as answer:
            kind = answer.headers.get("content-type", "")
            if answer.status_code != 200 or not kind.startswith("text/event-stream"):
                text = f"status {answer.status_code}, {kind!r}, no event stream"
                raise TransportError(f"monitor {self.url}: GET /events: {text}")
            yield answer.iter_raw()

    def close(self) -> None:
        """Close the connections; safe twice."""
        self._http.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def fetch_placement(
    url: str, timeout: timedelta = timedelta(seconds=5), access: Access = OPEN
) -> Placement:
    """Return a monitor's placement; its term is 0 while the monitor has decided nothing.

    Args:
        url: The monitor's URL.
        timeout: Bounds each phase of the call.
        access: The token to show, and what verifies the monitor's certificate.

    Raises:
        ConfigError: The URL is none.
        PeerTimeout: The monitor did not answer in time.
        PeerGone: It cannot be reached.
        AccessDenied: It asks for another token.
        TransportError: What answers is no monitor.
    """
    with MonitorLink(url, timeout, access) as link:
        return link.placement()[0]
