"""The client's end of the protocol: send a layer's tokens, wait, fail over, add up.

Shape legend: T tokens, K experts per token, D hidden.
"""

from __future__ import annotations

import atexit
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

from torch import Tensor

from torch_eaas.client_calls import Call
from torch_eaas.client_engine import CallEngine
from torch_eaas.client_inputs import check_finite, new_call
from torch_eaas.client_pairs import Connection
from torch_eaas.client_staging import Staging
from torch_eaas.client_tickets import Tickets
from torch_eaas.client_turns import ThreadTurn, Turn
from torch_eaas.comm.auto import transport_of
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig
from torch_eaas.errors import ConfigError
from torch_eaas.pair_keeper import PairKeeper
from torch_eaas.placement import Placement
from torch_eaas.spans import span


class Client:
    """Asks expert servers for experts; the caller owns and closes it.

    One thread at a time may dispatch and combine; ``DoubleBatchOverlap`` sees to that for its own.

    Args:
        config: The client's options.
        servers: Control addresses of servers, if there is no monitor.
        monitor: URL of a monitor that says which servers there are.
        transport: How servers are reached: a transport, the name of one, or ``"auto"``; the
            default is shared memory on this host.
        instance: This life's id; by default a random one.
        clock: Seconds, monotonic; tests plan it.
        background: Keep pairs open from a thread; without it, call ``maintain``.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        servers: Sequence[str] = (),
        monitor: str | None = None,
        transport: Transport | str | None = None,
        instance: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        background: bool = True,
    ) -> None:
        self.config = config
        self.instance = instance if instance is not None else secrets.randbits(64) | 1
        self._transport = transport_of(transport or "shared_memory")
        self._clock = clock
        self._counters: Counter[str] = Counter()
        self._keeper = PairKeeper(
            config,
            self.instance,
            Connection,
            servers=servers,
            monitor=monitor,
            transport=self._transport,
            clock=clock,
            background=background,
            counters=self.counters,
        )
        self._connections = self._keeper.connections
        self._directory = self._keeper.directory
        self._closed = self._keeper.stopped
        self._tickets: Tickets[Call] = Tickets()
        self._staging = Staging(config.name)
        self._thread_turn = ThreadTurn()
        self._engine = CallEngine(
            config,
            self.instance,
            self._transport,
            self._connections,
            clock=clock,
            counters=self._counters,
        )
        # a thread that is inside torch when the interpreter ends would end the process hard
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

    def dispatch(
        self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, num_experts: int
    ) -> Tensor:
        """Send a layer's tokens to the servers of their experts; return at once.

        Args:
            layer: The layer, as the servers number it.
            x_TD: Hidden states, ``(T, D)``, fp32, bf16 or fp16. From a GPU all three go through
                pinned memory, and the call waits for the device.
            ids_TK: Expert ids, ``(T, K)``; -1 and ``num_experts`` mean "no expert".
            weights_TK: Final router weights, ``(T, K)``; nobody scales them again.
            num_experts: Experts of this layer.

        Returns:
            A ticket for ``combine``: an int64 tensor of one element, otherwise opaque. One that
            is dropped uncombined, since an error came between, is given up at the next dispatch.

        Raises:
            ConfigError: A shape, dtype or id does not fit, too many dispatches are under way, the
                client is closed, or the call is captured in a CUDA graph.
            ExpertUnavailable: No server holds an expert, and none came in ``recovery_timeout``.
        """
        started = self._clock()
        if self._closed.is_set():
            raise ConfigError(f"client {self.config.name} is closed; open one for this layer")
        if self._tickets:
            self._tickets.forget_dropped()
        call = new_call(self.config, layer, num_experts, x_TD, ids_TK, weights_TK, self._staging)
        if len(self._tickets) >= self.config.max_micro_batches:
            raise ConfigError(
                f"{len(self._tickets)} dispatches wait for their combine; "
                f"raise max_micro_batches (now {self.config.max_micro_batches})"
            )
        call.turn = turn = self._thread_turn.turn
        try:
            if call.num_tokens:
                with span("dispatch", layer, turn.index):
                    self._engine.begin(call, turn)
        except BaseException:
            call.release()
            raise
        ticket = self._tickets.issue(call)
        self._counters["dispatches"] += 1
        self._counters["tokens"] += call.num_tokens
        self._counters["bookkeeping_us"] += int((self._clock() - started) * 1e6)
        return ticket

    def combine(self, ticket: Tensor, add: Tensor | None = None) -> Tensor:
        """Wait for the answers of a dispatch and add them up.

        Args:
            ticket: What ``dispatch`` returned; it is used up.
            add: Added to the sum before it is cast, ``(T, D)``: the shared expert's output.

        Returns:
            ``(T, D)``, of the dispatched dtype, where the hidden states were.

        Raises:
            AnomalyError: The sum has NaN or Inf, and ``detect_anomalies`` is set.
            ConfigError: The ticket was combined before, or the call is captured in a CUDA graph.
            ExpertUnavailable: An expert's servers are all gone or late, and no other came in time.
            RequestRefused: A server refused the request as malformed.
        """
        call = self._tickets.redeem(ticket)
        started = self._clock()
        turn = self._thread_turn.turn
        try:
            turn.check()
            with span("wait", call.layer, turn.index):
                self._engine.finish(call, turn)
            waited = self._clock()
            with span("sum", call.layer, turn.index):
                result = call.sum(
                    self.config.hidden_size, exact=self.config.combine == "exact", add=add
                )
        finally:
            call.release()
        if self.config.detect_anomalies:
            check_finite(f"layer {call.layer}", "the experts' sum", result)
        if call.tokens_without_experts:
            self._counters["tokens_without_experts"] += call.tokens_without_experts
        self._counters["wait_us"] += int((waited - started) * 1e6)
        self._counters["experts_us"] += call.experts_us
        self._counters["bookkeeping_us"] += int((self._clock() - waited) * 1e6)
        return result

    @contextmanager
    def taking_turns(self, turn: Turn) -> Iterator[None]:
        """Let this thread's calls wait through ``turn``; an error gives up what it has dispatched.

        Raises:
            ConfigError: This thread takes turns already.
        """
        mine = self._thread_turn
        if mine.is_taken:
            raise ConfigError("a micro-batch cannot be split again: overlap is running already")
        mine.turn, mine.is_taken = turn, True
        try:
            yield
        except BaseException:
            self._tickets.give_up(turn)
            raise
        finally:
            del mine.turn, mine.is_taken

    def counters(self) -> dict[str, int]:
        """Return what happened so far: dispatches, tokens, requests, hedges, resends, times."""
        return dict(self._counters)

    def maintain(self) -> None:
        """Open, re-open and close pairs now; a background thread does it otherwise."""
        self._keeper.maintain()

    @property
    def placement(self) -> Placement:
        """The newest placement that this client knows."""
        return self._connections.placement

    def close(self) -> None:
        """End all pairs and leave the monitor; safe twice, and done at exit if it was forgotten."""
        if self._keeper.stop():
            atexit.unregister(self.close)
            self._tickets.close()
            self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
