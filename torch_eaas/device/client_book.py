"""The calls of a client on a device that are under way: one in each micro-batch, in a step or not.

Shape legend: T tokens, K experts per token, D hidden, d FP8 scales of a token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torch_eaas.client_tickets import Tickets
from torch_eaas.config import ClientConfig
from torch_eaas.device.client_calls import DeviceCall, to_wire
from torch_eaas.device.client_tables import DeviceTables
from torch_eaas.device.client_words import StepWords
from torch_eaas.errors import ConfigError
from torch_eaas.row_views import TORCH_DTYPES


class _Chosen(threading.local):
    """Each thread's micro-batch."""

    micro_batch = 0


class CallBook:
    """Knows which micro-batch has what under way.

    Args:
        config: The client's options.
        tables: What the kernels know.
        device: Where they run.
    """

    def __init__(self, config: ClientConfig, tables: DeviceTables, device: torch.device) -> None:
        self._config = config
        self._tables = tables
        self._device = device
        self._wire_dtype = TORCH_DTYPES[config.wire_dtype]
        count, pairs = config.max_micro_batches, len(tables.pairs_PC)
        self.step_words = StepWords(count, pairs, device)
        """What the stages of a step write; all its micro-batches have one abort word."""
        self._eager_words = [StepWords(1, pairs, device) for _ in range(count)]
        self._calls: list[DeviceCall | None] = [None] * count
        self._tickets: Tickets[DeviceCall] = Tickets()
        self._chosen = _Chosen()
        self._in_step = False
        if device.type == "cuda":
            # a client's tensors are there before steps use them, on whatever stream
            torch.cuda.current_stream(device).synchronize()

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[None]:
        """Let this thread's calls be those of a micro-batch; see ``DeviceClient``."""
        if not 0 <= index < self._config.max_micro_batches:
            raise ConfigError(
                f"micro_batch must be 0 to {self._config.max_micro_batches - 1}, got {index}; "
                f"raise max_micro_batches (now {self._config.max_micro_batches})"
            )
        before, self._chosen.micro_batch = self._chosen.micro_batch, index
        try:
            yield
        finally:
            self._chosen.micro_batch = before

    def begin_step(self) -> None:
        """Begin a step: what is dispatched from here on is part of it."""
        self._in_step = True
        self.step_words.clear()

    def end_step(self) -> None:
        """End the list of a step's launches, and give up what it left uncombined."""
        self._in_step = False
        self._tickets.close()

    @property
    def num_under_way(self) -> int:
        """Dispatches that wait for their combine."""
        self._tickets.forget_dropped()
        return len(self._tickets)

    def open(
        self, layer: int, num_experts: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, DeviceCall]:
        """Return a new call of this thread's micro-batch, and its ticket.

        Raises:
            ConfigError: The micro-batch has one under way, or a graph is being captured that
                cannot have this call.
        """
        self._tickets.forget_dropped()
        self._prepare(layer, num_experts)
        index = self._chosen.micro_batch
        under_way = self._calls[index]
        if under_way is not None:
            raise ConfigError(
                f"layer {layer}: micro-batch {index} has layer {under_way.layer}'s dispatch under "
                f"way; combine it first, or dispatch within client.micro_batch(i) of another one"
            )
        if self._in_step:
            words, lane = self.step_words, self.step_words.lanes[index]
        else:
            words = self._eager_words[index]
            words.clear()
            [lane] = words.lanes

        def done() -> None:
            self._calls[index] = None
            self._tables.num_users -= 1

        x_wire, scales_Td = to_wire(x_TD, self._wire_dtype)
        call = DeviceCall(
            layer,
            num_experts,
            micro_batch=index,
            dtype=x_TD.dtype,
            x_TD=x_wire,
            scales_Td=scales_Td,
            ids_TK=ids_TK.to(torch.int32).contiguous(),
            weights_TK=weights_TK.detach().float().contiguous(),
            words=words,
            lane=lane,
            in_step=self._in_step,
            done=done,
        )
        self._calls[index] = call
        self._tables.num_users += 1
        return self._tickets.issue(call), call

    def redeem(self, ticket: Tensor) -> DeviceCall:
        """Return a ticket's call and use the ticket up; ConfigError if it is used up already."""
        return self._tickets.redeem(ticket)

    def close(self) -> None:
        """Give up all calls."""
        self._tickets.close()

    def _prepare(self, layer: int, num_experts: int) -> None:
        """Bring the tables up to date, unless a step's launches are only listed."""
        is_capturing = _is_capturing(self._device)
        if is_capturing and not self._in_step:
            raise ConfigError(
                f"layer {layer}: an eager dispatch waits for the device, which no capture allows; "
                f"capture a step with CapturedStep(client, fn)"
            )
        if not self._tables.has(layer):
            if is_capturing:
                raise ConfigError(
                    f"layer {layer} has no table yet, and none can be made during a capture; "
                    f"run the step once before it is captured"
                )
            self._tables.refresh()
            self._tables.add(layer, num_experts)
        elif not self._in_step:
            self._tables.refresh()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
