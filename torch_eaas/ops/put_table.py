"""The table of puts: which pairs' windows are reached by NVSHMEM, and where.

Such a pair's row in the table of pairs names memory of this process alone: the window that the peer
writes into, and a *staging* window, laid out like the peer's, that this end writes as it would
write the peer's. What was staged is then put into the peer's window. Pairs whose windows are
reached by stores have a row of zeros here, so one graph serves both kinds.

Shape suffixes: see ``pair_table``; Q columns of this table.
"""

from __future__ import annotations

from enum import IntEnum

from torch_eaas.config import check_at_least
from torch_eaas.errors import ConfigError
from torch_eaas.protocol.layout import ALIGN, DTYPE_BYTES, PairSpec


class PutColumn(IntEnum):
    """What a row says, each 8 bytes."""

    WINDOW = 0
    """Symmetric address of the peer's window; 0 where stores reach it."""
    PE = 1
    """The peer's number among the processing elements."""
    TOKEN_BYTES = 2
    """Bytes of one token's hidden state in a request, or of its rows in a reply."""


NO_PUT = [0] * len(PutColumn)
"""The row of a pair whose windows are reached by stores."""


def request_put_row(spec: PairSpec, *, window: int, pe: int) -> list[int]:
    """Return a client's row for a server, to be copied into an int64 table ``(P, Q)``.

    Args:
        spec: What was agreed.
        window: Where the request window lies on the server, as a symmetric address of this process.
        pe: The server's number.

    Raises:
        ConfigError: The address is no multiple of 128, or the number is negative.

    Example:
        With D = 8 in fp32 a token takes 32 bytes: ``[window, pe, 32]``.
    """
    return _row(window, pe, spec.hidden_size * DTYPE_BYTES[spec.wire_dtype])


def reply_put_row(spec: PairSpec, *, window: int, pe: int) -> list[int]:
    """Return a server's row for a client; like ``request_put_row``.

    Example:
        With D = 8, K = 2 and fp32 rows in `exact` mode a token takes 64 bytes.
    """
    row_bytes = spec.hidden_size * DTYPE_BYTES[spec.reply_dtype]
    return _row(window, pe, spec.rows_per_token * row_bytes)


def _row(window: int, pe: int, token_bytes: int) -> list[int]:
    if window < 1 or window % ALIGN:
        raise ConfigError(
            f"window must be an address that is a multiple of {ALIGN}, got {window:#x}; take it "
            f"from the symmetric memory that the windows were dealt from"
        )
    check_at_least("pe", pe, 0)
    row = {PutColumn.WINDOW: window, PutColumn.PE: pe, PutColumn.TOKEN_BYTES: token_bytes}
    return [row[column] for column in PutColumn]
