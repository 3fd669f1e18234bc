"""A server's side of its pairs: windows mapped, frames read and checked, answers written.

Shape legend: T tokens, K experts per token, D hidden, d scales per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_eaas.comm.window import Window
from torch_eaas.errors import TransportError
from torch_eaas.protocol.layout import (
    REPLY_HEADER,
    REQUEST_HEADER,
    WORD_BYTES,
    PairSpec,
    Status,
)
from torch_eaas.protocol.slots import ServerSlots
from torch_eaas.row_views import TORCH_DTYPES, RowViews

SLOW_SCAN_S = 0.05
"""How often the windows of a client are looked at that the monitor has not heard for a lease."""


class BadFrame(TransportError):
    """A frame that is answered with an error instead of being run."""

    def __init__(self, status: Status, text: str) -> None:
        self.status = status
        super().__init__(text)


@dataclass(slots=True, eq=False)
class Frame:
    """One request as the server took it: header, ids and weights are copies, checked once."""

    pair: ServerPair
    slot: int
    word: int
    since: float
    layer: int
    ids_TK: NDArray[np.int32]
    weights_TK: NDArray[np.float32]
    hidden_TD: Tensor
    """A view into the window."""
    scales_Td: Tensor | None = None
    """A view into the window too: what brings fp8 numbers back; None for any other format."""


class ServerPair:
    """One client's windows as the server reads and writes them.

    Args:
        peer: The control connection that the pair came over.
        client: The client's name, for messages.
        instance: The client's instance id.
        epoch: The number of the pair's window.
        spec: What was agreed.
        requests: The request window; the client writes it.
        replies: The reply window; this server writes it.
        now: The server's clock.
    """

    def __init__(
        self,
        *,
        peer: int,
        client: str,
        instance: int,
        epoch: int,
        spec: PairSpec,
        requests: Window,
        replies: Window,
        now: float,
    ) -> None:
        self.peer, self.client, self.instance, self.epoch = peer, client, instance, epoch
        self.spec = spec
        self.slots = ServerSlots(spec.slots, now)
        self.is_silent = False
        """Whether the client may be dead: it is looked at seldom, until it asks again."""
        self._next_scan = 0.0
        self._requests = requests.view
        self._replies = replies.view
        num_words = spec.slots * WORD_BYTES
        self._request_words = self._requests[:num_words].cast("Q")
        self._reply_words = self._replies[:num_words].cast("Q")
        self._copied: tuple[int, int, tuple[int, ...]] = (-1, 0, ())
        slots = range(spec.slots)
        self._request_at = [spec.request_slot(slot) for slot in slots]
        self._reply_at = [spec.reply_slot(slot) for slot in slots]
        self._ids = [self._small(np.int32, at + spec.ids_offset) for at in self._request_at]
        self._weights = [
            self._small(np.float32, at + spec.weights_offset) for at in self._request_at
        ]
        self._hidden = RowViews(
            self._requests,
            TORCH_DTYPES[spec.wire_dtype],
            (spec.max_tokens, spec.hidden_size),
            [at + spec.hidden_offset for at in self._request_at],
        )
        self._scales = None
        if spec.scales_per_token:
            self._scales = RowViews(
                self._requests,
                torch.float32,
                (spec.max_tokens, spec.scales_per_token),
                [at + spec.scales_offset for at in self._request_at],
            )
        self._rows = RowViews(
            self._replies,
            TORCH_DTYPES[spec.reply_dtype],
            spec.rows_shape,
            [at + spec.rows_offset for at in self._reply_at],
        )

    def scan(self, now: float) -> bool:
        """Look for new words; return whether a request is ready."""
        if now < self._next_scan:
            return False
        self.slots.scan(self._request_words.tolist(), now)
        is_ready = self.slots.num_ready > 0
        if self.is_silent:
            self.is_silent = not is_ready
            self._next_scan = now + SLOW_SCAN_S if self.is_silent else 0.0
        return is_ready

    def peek_rows(self) -> int:
        """Return the most rows that the next ready request may add to a batch."""
        slot, word, _ = self.slots.peek()
        num_tokens: int = min(self._header(slot, word)[6], self.spec.max_tokens)
        return num_tokens * self.spec.top_k

    def read(self, slot: int, word: int, since: float, now: float) -> Frame:
        """Return the frame in a slot; BadFrame if it cannot be run."""
        layer, num_tokens = self._read_header(slot, word, since, now)
        # copied once and checked in the copy: the client can still change the window
        ids_TK = self._ids[slot][:num_tokens].copy()
        if min(ids_TK.ravel().tolist()) < -1:
            token, k = np.argwhere(ids_TK < -1)[0].tolist()
            raise BadFrame(
                Status.BAD_REQUEST,
                f"layer {layer}, token {token}: expert id {ids_TK[token, k]} is below -1",
            )
        weights_TK = self._weights[slot][:num_tokens].copy()
        hidden_TD = self._hidden.first(slot, num_tokens)
        scales_Td = None if self._scales is None else self._scales.first(slot, num_tokens)
        return Frame(self, slot, word, since, layer, ids_TK, weights_TK, hidden_TD, scales_Td)

    def answer(
        self, frame: Frame, rows: Tensor, *, queue_us: int, experts_us: int, version: int
    ) -> None:
        """Write an answer: rows, header, then the word."""
        num_tokens = len(frame.ids_TK)
        self._rows.store(frame.slot, num_tokens, rows)
        self._finish(frame.slot, frame.word, Status.OK, num_tokens, queue_us, experts_us, version)

    def refuse(self, slot: int, word: int, status: Status, text: str, *, version: int) -> None:
        """Answer a request with an error's text."""
        data = text.encode()[: min(4096, self.spec.reply_rows_bytes)]
        start = self._reply_at[slot] + self.spec.rows_offset
        self._replies[start : start + len(data)] = data
        self._finish(slot, word, status, len(data), 0, 0, version)

    def _header(self, slot: int, word: int) -> tuple[int, ...]:
        """Return a request's header, copied out of the window once: the client can change it."""
        if self._copied[:2] != (slot, word):
            header = REQUEST_HEADER.unpack_from(self._requests, self._request_at[slot])
            self._copied = (slot, word, header)
        return self._copied[2]

    def _read_header(self, slot: int, word: int, since: float, now: float) -> tuple[int, int]:
        """Return the layer and the number of tokens of the request in a slot."""
        instance, epoch, sequence, _, budget_us, layer, num_tokens, flags = self._header(slot, word)
        if (instance, epoch, sequence) != (self.instance, self.epoch, word >> 8):
            raise BadFrame(
                Status.STALE,
                f"the frame is of instance {instance:016x}, epoch {epoch}, sequence {sequence}; "
                f"this window takes {self.instance:016x}, {self.epoch}, {word >> 8}",
            )
        if not 1 <= num_tokens <= self.spec.max_tokens or flags:
            raise BadFrame(
                Status.BAD_REQUEST,
                f"a request has 1 to {self.spec.max_tokens} tokens and flags 0, "
                f"got {num_tokens} tokens and flags {flags}",
            )
        waited_us = int((now - since) * 1e6)
        if waited_us > budget_us:
            raise BadFrame(
                Status.EXPIRED, f"seen after {waited_us} us, its time was {budget_us} us"
            )
        return layer, num_tokens

    def _finish(
        self,
        slot: int,
        word: int,
        status: Status,
        size: int,
        queue_us: int,
        experts_us: int,
        version: int,
    ) -> None:
        REPLY_HEADER.pack_into(
            self._replies,
            self._reply_at[slot],
            self.instance,
            self.epoch,
            word >> 8,
            version,
            status,
            size,
            min(queue_us, 0xFFFFFFFF),
            min(experts_us, 0xFFFFFFFF),
        )
        # the word comes last: whoever sees it may read the rest
        self._store_word(slot, word)

    def _store_word(self, slot: int, word: int) -> None:
        self._reply_words[slot] = ServerSlots.reply_word(word)

    def _small(self, dtype: type[np.int32 | np.float32], offset: int) -> NDArray[Any]:
        """Return a request slot's ids or weights, ``(max_tokens, K)``."""
        shape = (self.spec.max_tokens, self.spec.top_k)
        count = shape[0] * shape[1]
        return np.frombuffer(self._requests, dtype, count, offset).reshape(shape)
