"""Where every byte of a window lies: one field table, and the sizes that follow from a pair's spec.

A window is a row of words, then the slots::

    | word 0 | word 1 | ... | pad to 128 |  slot 0  |  slot 1  | ...

    request slot:  | header | ids (T, K) int32 | weights (T, K) fp32 | hidden (T, D) wire dtype |
    in fp8:        | header | ids (T, K) int32 | weights (T, K) fp32 | scales (T, d) fp32 | hidden |
    reply slot:    | header | rows: (T, D) in partial mode, (T, K, D) in exact mode |

Each part starts at a multiple of 128 bytes. The small parts come first, so that what a request of
few tokens uses is one contiguous piece, as a single one-sided put needs it. In fp8 each 128 numbers
of a token share a scale: d is ceil(D / 128).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from torch_eaas.config import (
    ClientConfig,
    Combine,
    ReplyDtype,
    WireDtype,
    check_at_least,
    check_choice,
)
from torch_eaas.errors import ConfigError

PROTOCOL_VERSION = 1
ALIGN = 128
WORD_BYTES = 8
HEADER_BYTES = 128
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
SCALE_COLUMNS = 128
"""Numbers of a token that share a scale in fp8."""

MAX_TOKENS = 1 << 16
MAX_SLOTS = 64
MAX_WINDOW_BYTES = 1 << 33


class Field(NamedTuple):
    """One number of a header: its name, its struct code (Q 8 bytes, I 4 bytes), its meaning."""

    name: str
    code: Literal["Q", "I"]
    meaning: str


REQUEST_FIELDS = (
    Field("instance", "Q", "the client's instance id"),
    Field("epoch", "Q", "the number of the pair's window"),
    Field("sequence", "Q", "the sequence that the request word will carry"),
    Field("placement_version", "Q", "the newest placement that the client knows"),
    Field("budget_us", "Q", "microseconds that are left of the request's time"),
    Field("layer", "I", "the layer that all ids of this request belong to"),
    Field("num_tokens", "I", "tokens T of this request, at least 1"),
    Field("flags", "I", "0; other values are refused"),
)
REPLY_FIELDS = (
    Field("instance", "Q", "the client's instance id, echoed"),
    Field("epoch", "Q", "echoed"),
    Field("sequence", "Q", "the sequence of the request word"),
    Field("placement_version", "Q", "the newest placement that the server knows"),
    Field("status", "I", "a Status"),
    Field("size", "I", "tokens answered if the status is OK, else bytes of the error's text"),
    Field("queue_us", "I", "microseconds from seeing the word to starting the batch"),
    Field("experts_us", "I", "microseconds that the batch's experts ran"),
)


class Status(IntEnum):
    """What became of a request."""

    OK = 0
    UNKNOWN_EXPERT = 1
    BAD_REQUEST = 2
    DRAINING = 3
    OVERLOADED = 4
    EXPIRED = 5
    INTERNAL = 6
    STALE = 7

    @property
    def may_retry(self) -> bool:
        """Whether another holder, or the same one later, can still answer."""
        return self is not Status.BAD_REQUEST


def header_struct(table: tuple[Field, ...]) -> struct.Struct:
    """Return the packer of a header: little-endian, without gaps."""
    return struct.Struct("<" + "".join(field.code for field in table))


REQUEST_HEADER = header_struct(REQUEST_FIELDS)
REPLY_HEADER = header_struct(REPLY_FIELDS)


def field_offsets(table: tuple[Field, ...]) -> dict[str, int]:
    """Return each field's offset within its header, in bytes; kernels take these as constants."""
    offsets, at = {}, 0
    for field in table:
        offsets[field.name] = at
        at += struct.calcsize(field.code)
    return offsets


def align(size: int) -> int:
    """Round up to a multiple of 128 bytes.

    Example:
        ``align(1)`` is 128, ``align(128)`` is 128, ``align(129)`` is 256.
    """
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True, kw_only=True)
class PairSpec:
    """What a client and a server agree on at the handshake; nothing of it is sent again."""

    hidden_size: int
    """Width D of a token's hidden state."""

    top_k: int
    """Experts per token, K."""

    slots: int
    """Requests that may be under way at once."""

    max_tokens: int
    """Most tokens of one request."""

    wire_dtype: WireDtype = "fp32"
    """Format of the hidden states."""

    reply_dtype: ReplyDtype = "fp32"
    """Format of the answers' rows."""

    combine: Combine = "partial"
    """One row per token, or one per (token, expert)."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "top_k", "slots", "max_tokens"):
            check_at_least(name, getattr(self, name), 1)
        check_choice("wire_dtype", self.wire_dtype, WireDtype)
        check_choice("reply_dtype", self.reply_dtype, ReplyDtype)
        check_choice("combine", self.combine, Combine)
        if self.slots > MAX_SLOTS or self.max_tokens > MAX_TOKENS:
            raise ConfigError(
                f"a pair has at most {MAX_SLOTS} slots of {MAX_TOKENS} tokens, "
                f"got {self.slots} of {self.max_tokens}"
            )
        for name in ("hidden_size", "top_k"):
            # a product of endless numbers would be too long for the next message
            if getattr(self, name) > MAX_WINDOW_BYTES:
                raise ConfigError(
                    f"{name} must be at most {MAX_WINDOW_BYTES}, got {getattr(self, name)}"
                )
        largest = max(self.request_bytes, self.reply_bytes)
        if largest > MAX_WINDOW_BYTES:
            raise ConfigError(
                f"a window has at most {MAX_WINDOW_BYTES} bytes, {self} needs {largest}; "
                f"lower max_tokens or max_micro_batches"
            )

    @classmethod
    def of(cls, config: ClientConfig) -> Self:
        """Return what clients with these options ask of each of their pairs."""
        return cls(
            hidden_size=config.hidden_size,
            top_k=config.top_k,
            slots=config.slots,
            max_tokens=config.max_tokens,
            wire_dtype=config.wire_dtype,
            reply_dtype=config.reply_dtype,
            combine=config.combine,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PairSpec:
        """Return the spec that ``to_json`` wrote; ConfigError names what is missing or unknown."""
        names = {field.name for field in fields(cls)}
        if set(data) != names:
            raise ConfigError(f"a pair's spec has the fields {sorted(names)}, got {sorted(data)}")
        return cls(**data)

    @cached_property
    def words_bytes(self) -> int:
        """Bytes of the row of words at a window's head."""
        return align(self.slots * WORD_BYTES)

    @cached_property
    def ids_offset(self) -> int:
        """Offset of the expert ids within a request slot."""
        return HEADER_BYTES

    @cached_property
    def weights_offset(self) -> int:
        """Offset of the router weights within a request slot."""
        return self.ids_offset + align(self.max_tokens * self.top_k * 4)

    @cached_property
    def scales_per_token(self) -> int:
        """Scales that a token's hidden state has; none unless the wire is fp8."""
        return -(-self.hidden_size // SCALE_COLUMNS) if self.wire_dtype == "fp8" else 0

    @cached_property
    def scales_offset(self) -> int:
        """Offset of the scales within a request slot; without any, that of the hidden states."""
        return self.weights_offset + align(self.max_tokens * self.top_k * 4)

    @cached_property
    def hidden_offset(self) -> int:
        """Offset of the hidden states within a request slot."""
        return self.scales_offset + align(self.max_tokens * self.scales_per_token * 4)

    @cached_property
    def request_slot_bytes(self) -> int:
        """Bytes from one request slot to the next."""
        hidden = self.max_tokens * self.hidden_size * DTYPE_BYTES[self.wire_dtype]
        return self.hidden_offset + align(hidden)

    @cached_property
    def rows_offset(self) -> int:
        """Offset of the rows, or of an error's text, within a reply slot."""
        return HEADER_BYTES

    @cached_property
    def rows_per_token(self) -> int:
        """Rows that one token takes in a reply."""
        return self.top_k if self.combine == "exact" else 1

    @cached_property
    def rows_shape(self) -> tuple[int, ...]:
        """Shape of a reply slot's rows."""
        if self.combine == "exact":
            return (self.max_tokens, self.top_k, self.hidden_size)
        return (self.max_tokens, self.hidden_size)

    @cached_property
    def reply_rows_bytes(self) -> int:
        """Bytes that a reply slot has for rows or text."""
        row = self.hidden_size * DTYPE_BYTES[self.reply_dtype]
        return align(self.max_tokens * self.rows_per_token * row)

    @cached_property
    def reply_slot_bytes(self) -> int:
        """Bytes from one reply slot to the next."""
        return self.rows_offset + self.reply_rows_bytes

    @cached_property
    def request_bytes(self) -> int:
        """Bytes of a request window."""
        return self.words_bytes + self.slots * self.request_slot_bytes

    @cached_property
    def reply_bytes(self) -> int:
        """Bytes of a reply window."""
        return self.words_bytes + self.slots * self.reply_slot_bytes

    def request_slot(self, slot: int) -> int:
        """Return the offset of a request slot within its window."""
        return self.words_bytes + slot * self.request_slot_bytes

    def reply_slot(self, slot: int) -> int:
        """Return the offset of a reply slot within its window."""
        return self.words_bytes + slot * self.reply_slot_bytes
