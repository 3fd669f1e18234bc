"""One dispatch under way: its shares, their requests, and the sum of the answers.

Shape legend: T tokens, K experts per token, D hidden, d scales per token, n tokens of one share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_eaas.client_pairs import Connection
from torch_eaas.client_pieces import IDS, Piece
from torch_eaas.client_turns import Turn
from torch_eaas.protocol.requests import Fate, Original, Request

FEW_ROWS = 8


class Sent(Request):
    """A piece as it was sent to one server; ``kept`` holds the answer once the slot is free."""

    __slots__ = ("conn", "kept", "piece", "sent_at", "slot", "word")

    def __init__(self, piece: Piece, server: str) -> None:
        super().__init__(server)
        self.piece = piece
        self.conn: Connection | None = None
        self.slot = -1
        self.word = 0
        self.sent_at = 0.0
        self.kept: Tensor | None = None

    @property
    def has_word(self) -> bool:
        """Whether the answer's word has come."""
        return self.conn is not None and self.conn.reply_words[self.slot] == self.word

    def rows(self) -> Tensor:
        """Return the answer's rows."""
        if self.kept is not None:
            return self.kept
        assert self.conn is not None
        return self.conn.rows(self.slot, len(self.piece.rows_n))

    def numpy_rows(self) -> NDArray[np.float32]:
        """Return the answer's rows in fp32, as numpy sees them."""
        if self.kept is None and self.conn is not None:
            rows = self.conn.numpy_rows(self.slot)
            if rows is not None:
                return rows
        return self.rows().float().numpy()

    def keep(self) -> None:
        """Copy the answer out of its slot, and free the slot."""
        self.kept = self.rows().clone()
        self.free()

    def free(self) -> None:
        """Free the slot, if this request has one: its answer has been read."""
        if self.conn is not None:
            self.conn.slots.release(self.slot)
            self.conn = None

    def drop(self) -> None:
        """Let go of a request that does not count: free its slot, or give it up."""
        if self.conn is None:
            if self.fate is Fate.WAITING:
                # it was never sent, and never will be
                self.fate = Fate.LOST
        elif self.fate is Fate.WAITING and not self.conn.lost:
            self.conn.give_up(self.slot)
            self.conn = None
            self.fate = Fate.LOST
        else:
            self.free()


class Share(Original):
    """What one server was first asked to contribute to one block of tokens."""

    __slots__ = (
        "alone_since",
        "failed",
        "give_up_at",
        "piece",
        "recovering",
        "refusal",
        "retry_at",
    )

    def __init__(self, piece: Piece, now: float, hedge_after: float, timeout: float) -> None:
        super().__init__(now, hedge_after, timeout)
        self.piece = piece
        self.recovering = False
        self.give_up_at: float | None = None
        self.alone_since = -1
        self.retry_at: float | None = None
        self.refusal = ""
        self.failed = False


class Call:
    """One dispatch from its inputs to the sum.

    Args:
        layer: The layer.
        num_experts: Experts of that layer, E.
        x_TD: The tokens in wire format, as numpy sees them.
        ids_TK: Expert ids, -1 for none.
        weights_TK: Router weights.
        dtype: The caller's dtype, which the result will have.
        scales_Td: The tokens' scales, where the wire format has any.
    """

    def __init__(
        self,
        layer: int,
        num_experts: int,
        x_TD: NDArray[Any],
        ids_TK: IDS,
        weights_TK: NDArray[np.float32],
        dtype: torch.dtype,
        scales_Td: NDArray[np.float32] | None = None,
    ) -> None:
        self.layer = layer
        self.num_experts = num_experts
        self.x_TD = x_TD
        self.scales_Td = scales_Td
        self.ids_TK = ids_TK
        self.weights_TK = weights_TK
        self.dtype = dtype
        self.asked_TK: NDArray[np.bool_] | None = None
        """Where there was an expert before any contribution was dropped."""
        self.shares: list[Share] = []
        self.waiting: list[Sent] = []
        self.unsent: list[tuple[Share, Sent]] = []
        self.sent_at = 0.0
        self.experts_us = 0
        self.ticket: weakref.ref[Tensor] | None = None
        """What the caller combines by; once it is gone, nobody will."""
        self.turn: Turn | None = None
        """Who dispatched it."""
        self.send_home: Callable[[Tensor], Tensor] | None = None
        """Brings the sum to where the caller's tensors are, if that is not the CPU."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.ids_TK)

    def has_news(self) -> bool:
        """Return whether an answer's word has come."""
        return any(request.has_word for request in self.waiting)

    def slots_of(self, conn: Connection) -> int:
        """Return how many slots of a pair this call has."""
        return sum(1 for request in self.sent() if request.conn is conn)

    def sent(self) -> Iterator[Sent]:
        """Yield every request of every alternative."""
        for share in self.shares:
            for request in share.requests():
                assert isinstance(request, Sent)
                yield request

    def release(self) -> None:
        """Free or give up every slot that this call still has."""
        for request in self.sent():
            request.drop()

    def drop(self, lonely_TK: NDArray[np.bool_]) -> None:
        """Do without these contributions; the others' weights grow to the sum they all had."""
        if self.asked_TK is None:
            self.asked_TK = self.ids_TK >= 0
        self.ids_TK = np.where(lonely_TK, -1, self.ids_TK)

    @property
    def tokens_without_experts(self) -> int:
        """Tokens of which every contribution was dropped."""
        if self.asked_TK is None:
            return 0
        return int((self.asked_TK.any(1) & (self.ids_TK < 0).all(1)).sum())

    def _scale(self, asked_TK: NDArray[np.bool_]) -> Tensor:
        """Return what makes up for the dropped contributions, ``(T, 1)``; 0 where none is left."""
        all_T = np.where(asked_TK, self.weights_TK, 0).sum(1, keepdims=True)
        left_T = np.where(self.ids_TK >= 0, self.weights_TK, 0).sum(1, keepdims=True)
        return torch.from_numpy(
            np.divide(all_T, left_T, out=np.zeros_like(all_T), where=left_T != 0)
        )

    def sum(self, hidden_size: int, *, exact: bool, add: Tensor | None) -> Tensor:
        """Add the winners' rows in fp32, in server order (``exact``: in order of k), and cast."""
        sum_TD = self._sum_exact(hidden_size) if exact else self._sum_partial(hidden_size)
        if self.asked_TK is not None:
            sum_TD = sum_TD * self._scale(self.asked_TK)
        if self.send_home is not None:
            sum_TD = self.send_home(sum_TD)
        if add is not None:
            sum_TD = sum_TD + add.detach()
        # what one server alone answered still lies in its window
        return sum_TD.to(self.dtype, copy=True)

    def _winners(self) -> Iterator[Sent]:
        for share in self.shares:
            for request in share.winner or ():
                assert isinstance(request, Sent)
                yield request

    def _sum_partial(self, hidden_size: int) -> Tensor:
        """Return the sum; what came first is read where it lies, and copied only by adding."""
        sum_TD: Tensor | None = None
        is_ours = False
        for request in self._winners():
            tokens_n = request.piece.rows_n
            covers_all = len(tokens_n) == self.num_tokens
            if covers_all and sum_TD is None:
                sum_TD = request.rows().float()
                continue
            if covers_all and not is_ours:
                assert sum_TD is not None
                sum_TD = sum_TD + request.rows()
                is_ours = True
                continue
            if not is_ours:
                sum_TD = (
                    torch.zeros(self.num_tokens, hidden_size) if sum_TD is None else sum_TD.clone()
                )
                is_ours = True
            assert sum_TD is not None
            if covers_all:
                sum_TD += request.rows()
            elif len(tokens_n) <= FEW_ROWS:
                # numpy's calls are shorter: at few rows the calls are all that costs
                to_TD, from_nD = sum_TD.numpy(), request.numpy_rows()
                for i, token in enumerate(tokens_n.tolist()):
                    row_D = to_TD[token]
                    np.add(row_D, from_nD[i], row_D)
            else:
                sum_TD.index_add_(0, torch.from_numpy(tokens_n), request.rows().float())
        return torch.zeros(self.num_tokens, hidden_size) if sum_TD is None else sum_TD

    def _sum_exact(self, hidden_size: int) -> Tensor:
        num_tokens, top_k = self.ids_TK.shape
        rows_TKD = torch.zeros(num_tokens, top_k, hidden_size)
        for request in self._winners():
            at_n, k_n = (torch.from_numpy(i) for i in np.nonzero(request.piece.ids_nK >= 0))
            tokens_n = torch.from_numpy(request.piece.rows_n)[at_n]
            rows_TKD[tokens_n, k_n] = request.rows()[at_n, k_n].float()
        sum_TD = rows_TKD[:, 0].clone()
        for k in range(1, top_k):
            sum_TD += rows_TKD[:, k]
        return sum_TD
