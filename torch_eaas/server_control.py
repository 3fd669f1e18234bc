"""A server's control endpoint: handshake, close, describe, health, metrics, placement, drain."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Generic

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from torch_eaas.access import Gate
from torch_eaas.comm.transport import Handler, Json, Reply, Transport
from torch_eaas.comm.window import Window
from torch_eaas.config import ServerConfig
from torch_eaas.errors import ConfigError, HandshakeRefused
from torch_eaas.placement import Holdings, Placement, ServerState
from torch_eaas.protocol.layout import PROTOCOL_VERSION, PairSpec
from torch_eaas.protocol.pairs import ServerEpochs
from torch_eaas.server_path import DataPath, P

logger = logging.getLogger(__name__)

_MISSHAPEN = (KeyError, TypeError, ValueError, OverflowError)
"""What reading a call's fields raises; the last one where JSON's numbers are infinite."""


class ServerControl(Handler, Generic[P]):
    """Keeps the list of a server's pairs, and answers control calls about them.

    A pair that was taken off the list is never written again once the data path has settled.

    Args:
        config: The server's options.
        instance: This life's id.
        transport: Makes the request windows.
        hidden_size: Width that a client's spec must have.
        holdings: Tells what the server holds now.
        path: What serves the pairs on the list.
        drain: Begins a drain; returns at once.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        *,
        config: ServerConfig,
        instance: int,
        transport: Transport,
        hidden_size: int,
        holdings: Callable[[], Holdings],
        path: DataPath[P],
        drain: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._instance = instance
        self._transport = transport
        self._hidden_size = hidden_size
        self._holdings = holdings
        self._path = path
        self._drain = drain
        self._clock = clock
        self._epochs = ServerEpochs()
        self._gate = Gate(config.access, f"server {config.name}")
        self._registry = CollectorRegistry()
        self._registry.register(_Counters(self))
        self._changing = threading.Lock()
        self._silent: frozenset[int] = frozenset()
        self.state: ServerState = "serving"
        self.placement = Placement()
        """The newest that this server knows; clients ask for it while the monitor is away."""
        self.make_pair: Callable[..., P] = path.make_pair
        """Makes a pair; planned faults put one here that fails."""

    @property
    def pairs(self) -> tuple[P, ...]:
        """The pairs that are open."""
        return self._path.pairs

    @override
    def admits(self, peer: int, token: object) -> bool:
        return self._gate.admits(token, f"control connection {peer}")

    @override
    def handle(self, peer: int, verb: str, body: Json, windows: Sequence[Window]) -> Reply:
        if verb == "handshake":
            return self._handshake(peer, body, windows)
        calls: dict[str, Callable[[int, Json], Json]] = {
            "close": self._close_epoch,
            "describe": lambda *_: self.describe(),
            "health": lambda *_: {"ok": True, "state": self.state},
            "metrics": lambda *_: {"text": self.metrics()},
            "placement": lambda *_: {"placement": self.placement.to_json()},
            "drain": self._start_drain,
        }
        if verb not in calls:
            raise ConfigError(f"no control verb {verb!r}; there are handshake, {', '.join(calls)}")
        return calls[verb](peer, body), ()

    @override
    def gone(self, peer: int) -> None:
        self._drop(lambda pair: pair.peer == peer)

    def hear_silent(self, clients: frozenset[int]) -> None:
        """Note the clients, by instance, that are silent at the monitor.

        Whoever was silent before may have asked since: only a new silence slows its scan.
        """
        fresh, self._silent = clients - self._silent, clients
        for pair in self.pairs:
            if pair.instance in fresh:
                pair.is_silent = True

    def describe(self) -> Json:
        """Return who this server is and what it holds."""
        return {
            "name": self._config.name,
            "instance": f"{self._instance:016x}",
            "fingerprint": self._config.fingerprint,
            "hidden_size": self._hidden_size,
            "holdings": {str(layer): list(ids) for layer, ids in self._holdings().items()},
            "state": self.state,
        }

    def metrics(self) -> str:
        """Return this server's metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def numbers(self) -> dict[str, int]:
        """Return a copy of the serving loop's counters."""
        return dict(self._path.counters)

    @property
    def denied(self) -> int:
        """Control calls that came without the server's token."""
        return self._gate.denied

    def _handshake(self, peer: int, body: Json, windows: Sequence[Window]) -> Reply:
        try:
            client, instance = str(body["client"]), int(body["instance"], 16)
            epoch, fingerprint = int(body["epoch"]), str(body["fingerprint"])
            version, spec_json = body["protocol"], dict(body["spec"])
        except _MISSHAPEN as error:
            raise HandshakeRefused(f"not a handshake: {error!r}") from error
        if version != PROTOCOL_VERSION:
            raise HandshakeRefused(
                f"client {client} speaks protocol {version}, this server {PROTOCOL_VERSION}"
            )
        spec = PairSpec.from_json(spec_json)
        self._check(client, instance, fingerprint, spec, windows)
        self._epochs.accept(instance, epoch)
        make = partial(
            self.make_pair, peer=peer, client=client, instance=instance, epoch=epoch, spec=spec
        )
        requests = self._transport.create_window(spec.request_bytes)
        try:
            pair = make(requests=requests, replies=windows[0], now=self._clock())
            if self._drop(lambda old: old.instance == instance):
                # the answer says that nothing is written into older windows any more
                self._path.settle()
            with self._changing:
                # others may have come since it was checked
                self._check_room(instance)
                self._path.pairs = (*self.pairs, pair)
        except BaseException:
            requests.close()
            raise
        self._transport.ring()
        logger.info(
            "client %s: pair of %d slots, %.1f MiB here and %.1f MiB there",
            client,
            spec.slots,
            spec.request_bytes / 2**20,
            spec.reply_bytes / 2**20,
        )
        answer = {**self.describe(), "epoch": epoch}
        return answer, (requests,)

    def _check(
        self,
        client: str,
        instance: int,
        fingerprint: str,
        spec: PairSpec,
        windows: Sequence[Window],
    ) -> None:
        own = self._config.fingerprint
        # a client that names no storage takes any: "0123abcd" fits "0123abcd:bf16"
        if fingerprint and own and fingerprint != own and not own.startswith(f"{fingerprint}:"):
            raise HandshakeRefused(
                f"client {client} wants model {fingerprint}, server {self._config.name} has {own}"
            )
        if spec.hidden_size != self._hidden_size:
            raise HandshakeRefused(
                f"client {client} has hidden size {spec.hidden_size}, "
                f"server {self._config.name} has {self._hidden_size}"
            )
        self._check_agreed(client, spec)
        if self.state == "draining":
            raise HandshakeRefused(f"server {self._config.name} is draining")
        self._check_room(instance)
        if len(windows) != 1 or windows[0].nbytes != spec.reply_bytes:
            raise HandshakeRefused(
                f"a handshake brings one reply window of {spec.reply_bytes} bytes, "
                f"got {[window.nbytes for window in windows]}"
            )

    def _check_room(self, instance: int) -> None:
        others = sum(1 for pair in self.pairs if pair.instance != instance)
        if others >= self._config.max_pairs:
            raise HandshakeRefused(
                f"server {self._config.name} has {self._config.max_pairs} clients already"
            )

    def _check_agreed(self, client: str, spec: PairSpec) -> None:
        """Refuse a pair for which this server's path was not made."""
        agreed = self._path.agreed
        if agreed is None:
            return
        for field in fields(spec):
            wanted, has = getattr(spec, field.name), getattr(agreed, field.name)
            is_limit = field.name in ("slots", "max_tokens")
            if wanted != has and not (is_limit and wanted < has):
                raise HandshakeRefused(
                    f"client {client} has {field.name} {wanted}, server {self._config.name} was "
                    f"started for {'at most ' if is_limit else ''}{has}; give both the same"
                )

    def _close_epoch(self, peer: int, body: Json) -> Json:
        """Write into an epoch's window no more; the answer says that this is so."""
        try:
            instance, epoch = int(body["instance"], 16), int(body["epoch"])
        except _MISSHAPEN as error:
            raise HandshakeRefused(f"not a close: {error!r}") from error
        self._drop(lambda pair: pair.instance == instance and pair.epoch == epoch)
        self._path.settle()
        return {"closed": epoch}

    def _start_drain(self, peer: int, body: Json) -> Json:
        self._drain()
        return {"state": "draining"}

    def _drop(self, is_dropped: Callable[[P], bool]) -> bool:
        """Take pairs off the list; return whether there were any."""
        with self._changing:
            kept = tuple(pair for pair in self.pairs if not is_dropped(pair))
            dropped = len(kept) < len(self.pairs)
            self._path.pairs = kept
        return dropped


class _Counters(Collector):
    """Reads the counters when somebody asks, so that serving pays nothing for them."""

    def __init__(self, control: ServerControl[Any]) -> None:
        self._control = control

    @override
    def collect(self) -> Iterator[Metric]:
        numbers: dict[str, Any] = self._control.numbers()
        for name in ("requests", "tokens", "batches"):
            yield CounterMetricFamily(
                f"torch_eaas_server_{name}", f"{name} answered", value=numbers.get(name, 0)
            )
        yield CounterMetricFamily(
            "torch_eaas_server_experts_seconds",
            "seconds that experts ran",
            value=numbers.get("experts_us", 0) / 1e6,
        )
        refused = CounterMetricFamily(
            "torch_eaas_server_refused", "requests answered with an error", labels=["status"]
        )
        for key, value in numbers.items():
            if key.startswith("refused_"):
                refused.add_metric([key.removeprefix("refused_")], value)
        yield refused
        yield CounterMetricFamily(
            "torch_eaas_server_access_denied",
            "control calls without the token",
            value=self._control.denied,
        )
        yield GaugeMetricFamily(
            "torch_eaas_server_pairs", "clients connected", value=len(self._control.pairs)
        )
