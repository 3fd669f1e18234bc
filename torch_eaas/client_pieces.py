"""What a client sends to whom: a batch cut into pieces, each for one server.

Shape legend: T tokens, K experts per token, S servers, b tokens of a block, n tokens of a piece,
m tokens of all pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from torch_eaas.errors import ConfigError

IDS = NDArray[np.int64]


class Piece:
    """Some tokens and the experts that one server is to run for them.

    Args:
        server: Index into the placement's servers.
        rows_n: Numbers of the tokens within the batch, ascending.
        ids_nK: Their expert ids, -1 where the expert is another server's.
        weights_nK: Their router weights.
    """

    __slots__ = ("ids_nK", "rows_n", "server", "weights_nK")

    def __init__(
        self, server: int, rows_n: IDS, ids_nK: IDS, weights_nK: NDArray[np.float32]
    ) -> None:
        self.server = server
        self.rows_n = rows_n
        self.ids_nK = ids_nK
        self.weights_nK = weights_nK


def check_ids(layer: int, ids_TK: IDS, num_experts: int) -> IDS:
    """Return the ids with every "no expert" as -1: both -1 and ``num_experts`` mean that.

    Raises:
        ConfigError: An id is out of range; names layer, token and id.
    """
    if not ids_TK.size:
        return ids_TK
    # lists are faster at the sizes of a decode step
    flat = ids_TK.ravel().tolist() if ids_TK.size <= 512 else (int(ids_TK.max()), int(ids_TK.min()))
    highest = max(flat)
    if highest > num_experts or min(flat) < -1:
        token, k = np.argwhere((ids_TK > num_experts) | (ids_TK < -1))[0].tolist()
        raise ConfigError(
            f"layer {layer}, token {token}: expert id {ids_TK[token, k]} is not within 0 to "
            f"{num_experts - 1} (-1 and {num_experts} mean no expert)"
        )
    return np.where(ids_TK == num_experts, -1, ids_TK) if highest == num_experts else ids_TK


@functools.cache
def _numbers(num_servers: int) -> NDArray[np.int16]:
    """Return 0, 1, ... as ``(S, 1, 1)``."""
    return np.arange(num_servers, dtype=np.int16)[:, None, None]


def split(
    servers_TK: NDArray[np.int16],
    ids_TK: IDS,
    weights_TK: NDArray[np.float32],
    num_servers: int,
    max_tokens: int,
) -> Iterator[Piece]:
    """Cut a batch into pieces: by blocks of tokens, then by server, each token once per server.

    Args:
        servers_TK: The server that runs each expert, ``(T, K)``, -1 for none.
        ids_TK: Expert ids, -1 where there is no server.
        weights_TK: Router weights.
        num_servers: How many servers there are.
        max_tokens: Most tokens of a piece.
    """
    if num_servers == 1 and not np.count_nonzero(servers_TK):
        rows_T = np.arange(len(ids_TK))
        for start in range(0, len(ids_TK), max_tokens):
            block = slice(start, start + max_tokens)
            yield Piece(0, rows_T[block], ids_TK[block], weights_TK[block])
        return
    all_S = _numbers(num_servers)
    for start in range(0, len(ids_TK), max_tokens):
        block = slice(start, start + max_tokens)
        mine_SbK = servers_TK[block] == all_S
        # m counts all pieces' tokens, server after server
        is_asked_Sb = np.logical_or.reduce(mine_SbK, 2)
        server_m, rows_m = is_asked_Sb.nonzero()
        ids_mK = np.where(mine_SbK, ids_TK[block], -1)[is_asked_Sb]
        if start:
            rows_m += start
        weights_mK = weights_TK.take(rows_m, 0)
        end = 0
        for server, count in enumerate(np.bincount(server_m).tolist()):
            if count:
                part = slice(end, end + count)
                end += count
                yield Piece(server, rows_m[part], ids_mK[part], weights_mK[part])
