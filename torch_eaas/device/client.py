"""The client's end of the protocol on a device: kernels send, wait and add; the host replays them.

Shape legend: T tokens, K experts per token, D hidden.
"""

from __future__ import annotations

import atexit
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Self

import torch
from torch import Tensor

from torch_eaas.comm.auto import transport_of
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig, check_at_least
from torch_eaas.device.client_book import CallBook
from torch_eaas.device.client_calls import DeviceStages, check_inputs
from torch_eaas.device.client_eager import EagerCalls
from torch_eaas.device.client_failover import DeviceFailover, Parts, Patience
from torch_eaas.device.client_pairs import DeviceConnection
from torch_eaas.device.client_tables import DeviceTables
from torch_eaas.device.client_words import Report
from torch_eaas.device.stream import check_device
from torch_eaas.errors import ConfigError
from torch_eaas.pair_keeper import PairKeeper
from torch_eaas.placement import Placement


class DeviceClient:
    """Asks expert servers for experts by kernels of its device; the caller owns and closes it.

    On a GPU the host takes no part in a request. On a CPU the same stages run as their plain twins,
    over windows in shared memory. One thread runs steps: it dispatches, combines and refreshes, on
    one stream or on streams forked from it, one for each micro-batch.

    What changes while the client runs (who serves, who holds what) lies in tables that kernels
    read. They are written by ``refresh`` alone, between two replays of a captured step.

    Args:
        config: The client's options. ``max_tokens`` is the largest batch: nothing is split here.
        device: Where the model runs.
        servers: Control addresses of servers, if there is no monitor.
        monitor: URL of a monitor that says which servers there are.
        transport: How servers are reached: a transport whose windows the device can use, the name
            of one, or ``"auto"``, which is the default.
        max_servers: The most servers at once, P: a captured graph has room for so many.
        max_replicas: The most holders of one expert that are told apart, H.
        instance: This life's id; by default a random one.
        clock: Seconds, monotonic; tests plan it.
        background: Keep pairs open from a thread; without it, call ``maintain``.

    Raises:
        ConfigError: An option is not for the device path.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        device: torch.device | str = "cpu",
        servers: Sequence[str] = (),
        monitor: str | None = None,
        transport: Transport | str | None = None,
        max_servers: int = 16,
        max_replicas: int = 2,
        instance: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        background: bool = True,
    ) -> None:
        self.config = config
        _check_options(config)
        self.device = check_device(device)
        check_at_least("max_servers", max_servers, 1)
        check_at_least("max_replicas", max_replicas, 1)
        transport = transport_of(transport or "auto", device=str(self.device))
        self.instance = instance if instance is not None else secrets.randbits(64) | 1
        self._counters: Counter[str] = Counter()
        self._keeper = PairKeeper(
            config,
            self.instance,
            DeviceConnection,
            servers=servers,
            monitor=monitor,
            transport=transport,
            clock=clock,
            background=background,
            counters=self.counters,
        )
        self._connections = self._keeper.connections
        self._tables = DeviceTables(
            config,
            self._connections,
            instance=self.instance,
            device=self.device,
            max_servers=max_servers,
            max_replicas=max_replicas,
        )
        self._stages = DeviceStages(config, self._tables, self.device, transport)
        self._failover = DeviceFailover(
            Parts(config, self._connections, self._tables, self._counters, clock, self._stages.text)
        )
        self._eager = EagerCalls(config, self._stages, self._tables, self._failover)
        self._book = CallBook(config, self._tables, self.device)
        atexit.register(self.close)

    def wait_ready(
        self,
        layers: Sequence[int],
        num_experts: int,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        """Wait until every expert of these layers has a server with an open pair.

        Raises:
            ExpertUnavailable: One has none when ``timeout`` is over; names it.
        """
        self._keeper.wait_ready(layers, num_experts, timeout)

    # -- one layer -----------------------------------------------------------------------------

    def dispatch(
        self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, num_experts: int
    ) -> Tensor:
        """Send a layer's tokens to the servers of their experts; return at once.

        A captured step has one T; a smaller batch fills it up with rows whose ids are all -1: they
        go nowhere, and their sum is 0.

        Args:
            layer: The layer, as the servers number it.
            x_TD: Hidden states, ``(T, D)``, fp32, bf16 or fp16, on the client's device. They stay
                as they are until ``combine``.
            ids_TK: Expert ids, ``(T, K)``, int32 or int64; -1 and ``num_experts`` mean "no expert".
            weights_TK: Final router weights, ``(T, K)``; nobody scales them again.
            num_experts: Experts of this layer.

        Returns:
            A ticket for ``combine``: an int64 tensor of one element on the CPU.

        Raises:
            ConfigError: A shape or dtype does not fit, there are more tokens than ``max_tokens``,
                this micro-batch has a dispatch under way, this is the layer's first dispatch and a
                graph is being captured, or the client is closed.
        """
        if self._keeper.stopped.is_set():
            raise ConfigError(f"client {self.config.name} is closed; open one for this layer")
        check_inputs(self.config, layer, x_TD, ids_TK, weights_TK)
        if x_TD.device != self.device:
            raise ConfigError(
                f"layer {layer}: hidden states must be on the client's device {self.device}, got "
                f"{x_TD.device}; move them, or open a client with device={str(x_TD.device)!r}"
            )
        ticket, call = self._book.open(layer, num_experts, x_TD, ids_TK, weights_TK)
        self._counters["dispatches"] += 1
        if len(x_TD):
            try:
                self._stages.send(call)
            except BaseException:
                self._book.redeem(ticket).release()
                raise
        return ticket

    def combine(self, ticket: Tensor, add: Tensor | None = None) -> Tensor:
        """Wait for the answers of a dispatch and add them up.

        In a step this returns at once, and the result is right if the step ends well. Outside, the
        host waits, and asks others for what a server does not answer.

        Args:
            ticket: What ``dispatch`` returned; it is used up.
            add: Added to the sum before it is cast, ``(T, D)``: the shared expert's output.

        Returns:
            ``(T, D)``, of the dispatched dtype.

        Raises:
            ExpertUnavailable: Eagerly: an expert has no server, and none came in time.
            PeerTimeout: Eagerly: servers did not answer in time, one after the other.
            RequestRefused: Eagerly: a server refused the request.
        """
        call = self._book.redeem(ticket)
        try:
            if not len(call.x_TD):
                return call.x_TD.new_zeros(call.x_TD.shape, dtype=call.dtype)
            self._stages.wait(call)
            if call.in_step:
                return self._stages.add(call, add)
            return self._eager.finish(call, add)
        finally:
            call.release()

    def micro_batch(self, index: int) -> AbstractContextManager[None]:
        """Let this thread's dispatches be those of a micro-batch: each has one under way.

        Args:
            index: Which micro-batch, 0 to ``max_micro_batches`` - 1; it is 0 without this.

        Raises:
            ConfigError: There is no such micro-batch.
        """
        return self._book.micro_batch(index)

    # -- steps ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step, as the first node of a graph: from here on nothing is read by the host.

        ``CapturedStep`` does this; ``end_step`` must follow.
        """
        self._book.begin_step()

    @property
    def num_under_way(self) -> int:
        """Dispatches that wait for their combine."""
        return self._book.num_under_way

    def end_step(self) -> None:
        """End the list of a step's launches; what it left uncombined is given up."""
        self._book.end_step()

    def read_step(self) -> Report:
        """Wait for the last step, and return what became of it: the step's one host read."""
        report = self._book.step_words.read()
        if report.is_good:
            self._failover.note(report)
        return report

    def begin_failover(self) -> Patience:
        """Return what decides how to go on after a step that has failed."""
        return self._failover.begin(own=0)

    def refresh(self) -> None:
        """Write into the device's tables what has changed; without changes it costs nothing.

        For the thread that runs steps, between two replays, on the stream of the steps. Rows of
        servers that have gone are freed once no dispatch is under way.
        """
        self._tables.refresh()

    # -- the control plane ---------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return what happened so far: dispatches, failed steps, timeouts, refusals."""
        return dict(self._counters)

    def maintain(self) -> None:
        """Open, re-open and close pairs now; a background thread does it otherwise."""
        self._keeper.maintain()

    @property
    def placement(self) -> Placement:
        """The newest placement that this client knows."""
        return self._connections.placement

    def close(self) -> None:
        """End all pairs and leave the monitor; safe twice, and done at exit if it was forgotten.

        No step may be under way.
        """
        if self._keeper.stop():
            atexit.unregister(self.close)
            self._book.close()
            self._keeper.close()
            self._tables.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_options(config: ClientConfig) -> None:
    """Raise ConfigError for what the device path cannot do."""
    if config.on_missing == "drop":
        raise ConfigError(
            "on_missing='drop' is not on the device path: a graph cannot scale the weights of what "
            "is left; use on_missing='raise', or a Client"
        )
    if config.detect_anomalies:
        raise ConfigError(
            "detect_anomalies is not on the device path: it reads results on the host; look at the "
            "step's outputs, or use a Client"
        )
