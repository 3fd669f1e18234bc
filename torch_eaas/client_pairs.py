"""A client's side of its pairs: handshake, frames written, answers read, pairs kept open.

Shape legend: T tokens, K experts per token, D hidden, d scales per token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from torch_eaas.client_pieces import Piece
from torch_eaas.comm.transport import Json, Link, Transport
from torch_eaas.comm.window import Window
from torch_eaas.config import ClientConfig
from torch_eaas.errors import HandshakeRefused
from torch_eaas.open_pair import OpenPair
from torch_eaas.placement import ServerInfo
from torch_eaas.protocol.layout import (
    PROTOCOL_VERSION,
    REPLY_HEADER,
    REQUEST_HEADER,
    WORD_BYTES,
    PairSpec,
)
from torch_eaas.protocol.pairs import ClientPair
from torch_eaas.protocol.slots import ClientSlots
from torch_eaas.row_views import NUMPY_DTYPES, TORCH_DTYPES, RowViews
from torch_eaas.spans import is_profiling, mark

CONTROL_TIMEOUT_S = 2.0
"""How long a control call may take."""


C = TypeVar("C", bound=OpenPair)


class ReplyHeader(NamedTuple):
    """A reply's header, copied out of the window once."""

    instance: int
    epoch: int
    sequence: int
    placement_version: int
    status: int
    size: int
    queue_us: int
    experts_us: int


class Connection(OpenPair):
    """One open pair as the client's host writes and reads it.

    Args:
        server: The server at the other end.
        link: Its control connection; closing tells that the server is gone.
        spec: What was agreed.
        instance: This client's instance id.
        epoch: The number of the window.
        requests: The request window; this client writes it.
        replies: The reply window; the server writes it.
    """

    def __init__(
        self,
        server: ServerInfo,
        link: Link,
        spec: PairSpec,
        *,
        pair: ClientPair,
        instance: int,
        epoch: int,
        requests: Window,
        replies: Window,
    ) -> None:
        super().__init__(server, link, spec, pair=pair, instance=instance, epoch=epoch)
        self.slots = ClientSlots(spec.slots)
        self.lock = threading.Lock()
        # the views keep the memory
        self._requests, self._replies = requests.view, replies.view
        num_words = spec.slots * WORD_BYTES
        self._request_words = self._requests[:num_words].cast("Q")
        self.reply_words = self._replies[:num_words].cast("Q")
        bases = [spec.request_slot(slot) for slot in range(spec.slots)]
        shape_TK = (spec.max_tokens, spec.top_k)
        shape_TD = (spec.max_tokens, spec.hidden_size)
        wire = NUMPY_DTYPES[spec.wire_dtype]
        self._bases = bases
        self._ids = [self._array(np.int32, shape_TK, b + spec.ids_offset) for b in bases]
        self._weights = [self._array(np.float32, shape_TK, b + spec.weights_offset) for b in bases]
        shape_Td = (spec.max_tokens, spec.scales_per_token)
        self._scales = [self._array(np.float32, shape_Td, b + spec.scales_offset) for b in bases]
        self._hidden_at = [b + spec.hidden_offset for b in bases]
        self._hidden = [self._array(wire, shape_TD, b + spec.hidden_offset) for b in bases]
        self._reply_bases = [spec.reply_slot(slot) for slot in range(spec.slots)]
        self._rows = RowViews(
            self._replies,
            TORCH_DTYPES[spec.reply_dtype],
            spec.rows_shape,
            [base + spec.rows_offset for base in self._reply_bases],
        )

    @property
    @override
    def num_free(self) -> int:
        return self.slots.num_free

    @property
    @override
    def num_given_up(self) -> int:
        return self.slots.num_given_up

    @property
    @override
    def num_in_use(self) -> int:
        return self.slots.num_in_use

    def take(self) -> int | None:
        """Return a free slot, or None; late answers free the slots that were given up."""
        slot = self.slots.take()
        if slot is None and self.reclaim():
            slot = self.slots.take()
        return slot

    @override
    def reclaim(self) -> int:
        with self.lock:
            late = self.slots.reclaim(self.reply_words.tolist())
        self.num_late += late
        return late

    def give_up(self, slot: int) -> None:
        """Read a slot's answer no more."""
        with self.lock:
            self.slots.give_up(slot)

    def send(
        self,
        slot: int,
        layer: int,
        x_TD: NDArray[Any],
        piece: Piece,
        budget_us: int,
        version: int,
        scales_Td: NDArray[np.float32] | None = None,
    ) -> int:
        """Write a piece of the tokens ``x_TD`` as a request; return the word that will answer it.

        Payload and header first, the word last: on x86-64 stores become visible in this order.
        """
        rows_n = piece.rows_n
        num_tokens = len(rows_n)
        first = int(rows_n[0])
        if num_tokens == 1 or rows_n[-1] - first == num_tokens - 1:
            # neighbours are one piece of memory, and that is the fastest copy there is
            size = x_TD.shape[1] * x_TD.itemsize
            at, end = self._hidden_at[slot], first + num_tokens
            self._requests[at : at + num_tokens * size] = x_TD.data.cast("B")[
                first * size : end * size
            ]
        else:
            x_TD.take(rows_n, 0, self._hidden[slot][:num_tokens], "clip")
        self._ids[slot][:num_tokens] = piece.ids_nK
        self._weights[slot][:num_tokens] = piece.weights_nK
        if scales_Td is not None:
            scales_Td.take(rows_n, 0, self._scales[slot][:num_tokens], "clip")
        # stored last of all
        word = self.slots.post(slot)
        REQUEST_HEADER.pack_into(
            self._requests,
            self._bases[slot],
            self.instance,
            self.epoch,
            word >> 8,
            version,
            budget_us,
            layer,
            num_tokens,
            0,
        )
        if is_profiling():
            # before the word: the server's mark cannot come sooner
            mark("send", self.name, self.instance, self.epoch, slot, word >> 8)
        self._request_words[slot] = word
        return word + 1

    def header(self, slot: int) -> ReplyHeader:
        """Return a copy of a reply's header."""
        return ReplyHeader._make(REPLY_HEADER.unpack_from(self._replies, self._reply_bases[slot]))

    def rows(self, slot: int, num_tokens: int) -> Tensor:
        """Return a view of a reply's rows, ``(T, D)`` or ``(T, K, D)``."""
        return self._rows.first(slot, num_tokens)

    def numpy_rows(self, slot: int) -> NDArray[Any] | None:
        """Return all rows of a reply slot as numpy sees them; None unless they are fp32."""
        return self._rows.array(slot)

    def text(self, slot: int, size: int) -> str:
        """Return a copy of a reply's error text."""
        start = self._reply_bases[slot] + self.spec.rows_offset
        return bytes(self._replies[start : start + min(size, 4096)]).decode(errors="replace")

    def _array(self, dtype: Any, shape: tuple[int, int], offset: int) -> NDArray[Any]:
        count = shape[0] * shape[1]
        flat = np.frombuffer(self._requests, dtype=dtype, count=count, offset=offset)
        return flat.reshape(shape)


def hello_of(config: ClientConfig, instance: int, epoch: int, fingerprint: str) -> Json:
    """Return what a handshake says of a client."""
    return {
        "client": config.name,
        "instance": f"{instance:016x}",
        "epoch": epoch,
        "protocol": PROTOCOL_VERSION,
        "fingerprint": fingerprint,
    }


def open_connection(
    make: Callable[..., C],
    transport: Transport,
    link: Link,
    spec: PairSpec,
    *,
    server: ServerInfo,
    pair: ClientPair,
    hello: Json,
) -> tuple[C, str]:
    """Open a pair by a handshake; return it and the server's fingerprint.

    Args:
        make: Makes the pair, given both windows, which it must not close: ``Connection``.
        transport: Makes the reply window.
        link: A control connection to the server.
        spec: What the client wants.
        server: The server, as the placement names it.
        pair: What the client remembers of this server.
        hello: Who the client is, with the epoch of this attempt.

    Raises:
        HandshakeRefused: The server refused, or is another than the placement names.
        TransportError: It did not answer, or there is no memory.
    """
    replies = transport.create_window(spec.reply_bytes)
    windows: list[Window] = []
    try:
        body = {**hello, "spec": spec.to_json()}
        answer, windows = link.call("handshake", body, [replies], timeout=CONTROL_TIMEOUT_S)
        if answer.get("instance") != f"{server.instance:016x}":
            raise HandshakeRefused(
                f"{server.address} is now instance {answer.get('instance')}, "
                f"the placement names {server.instance:016x}"
            )
        if [w.nbytes for w in windows] != [spec.request_bytes]:
            raise HandshakeRefused(
                f"{server.address}: a handshake's answer brings one window of "
                f"{spec.request_bytes} bytes, got {[w.nbytes for w in windows]}"
            )
        conn = make(
            server,
            link,
            spec,
            pair=pair,
            instance=int(hello["instance"], 16),
            epoch=hello["epoch"],
            requests=windows[0],
            replies=replies,
        )
        return conn, str(answer.get("fingerprint", ""))
    finally:
        # what the pair took keeps the memory, and a refused attempt leaves no descriptor behind
        for each in (replies, *windows):
            each.close()
