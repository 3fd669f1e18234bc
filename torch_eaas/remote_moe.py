"""MoE layers whose experts live in other processes.

Shape legend: T tokens, K experts per token, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_eaas.client import Client
from torch_eaas.config import check_at_least
from torch_eaas.errors import ConfigError, InferenceOnlyError

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps tokens ``(T, D)`` to expert ids and final weights, both ``(T, K)``."""


class RemoteExperts(nn.Module):
    """The routed experts of one layer, run by servers. Has no parameters; inference only.

    Args:
        client: Reaches the servers. The caller owns and closes it.
        layer: The layer, as the servers number it.
        num_experts: Experts of this layer, E.
        top_k: Experts per token, K; must be the client's.
    """

    def __init__(self, client: Client, *, layer: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        check_at_least("layer", layer, 0)
        check_at_least("num_experts", num_experts, 1)
        if top_k != client.config.top_k:
            raise ConfigError(
                f"layer {layer} has top_k {top_k}, its client {client.config.top_k}; "
                f"give the client the model's top_k"
            )
        self.client = client
        self.layer = layer
        self.num_experts = num_experts
        self.top_k = top_k

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, ``(T, D)``, in ``x_TD``'s dtype."""
        return self.combine(self.dispatch(x_TD, experts_TK, weights_TK))

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Send the tokens to their experts and return at once, with a ticket for ``combine``.

        Args:
            x_TD: Hidden states, ``(T, D)``.
            experts_TK: Expert ids, ``(T, K)``; -1 and ``num_experts`` mean "no expert".
            weights_TK: Final router weights, ``(T, K)``.

        Returns:
            An int64 tensor of one element, otherwise opaque; each ticket is combined once.
        """
        return self.client.dispatch(
            self.layer, x_TD, experts_TK, weights_TK, num_experts=self.num_experts
        )

    def combine(self, ticket: Tensor, add: Tensor | None = None) -> Tensor:
        """Wait for a dispatch's answers; return their sum plus ``add``, ``(T, D)``.

        Blocks until every expert has answered: at most ``request_timeout``, and, for an expert
        whose holders are all gone or late by then, ``recovery_timeout`` more. A server that dies
        meanwhile is replaced where another holds its experts.
        """
        sum_TD = self.client.combine(ticket, add)
        return _forward_only(sum_TD) if torch.is_grad_enabled() else sum_TD

    def extra_repr(self) -> str:
        """Return the numbers that ``repr`` shows."""
        return f"layer={self.layer}, num_experts={self.num_experts}, top_k={self.top_k}"


class UnderWay(NamedTuple):
    """A layer's call between its two halves; each is combined once."""

    ticket: Tensor
    shared_TD: Tensor | None
    shape: torch.Size


class RemoteMoE(nn.Module):
    """Route tokens, let remote experts run them, and add the shared expert's output.

    Args:
        router: Maps tokens ``(T, D)`` to expert ids and weights, both ``(T, K)``.
        experts: Dispatches the routed tokens and combines the answers.
        shared: An expert that every token visits; it runs here while the answer is under way.
    """

    def __init__(
        self, router: Router, experts: RemoteExperts, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, of the shape of ``x``: ``(T, D)`` or ``(..., T, D)``."""
        return self.combine(self.dispatch(x))

    def dispatch(self, x: Tensor) -> UnderWay:
        """Route, send, and run the shared expert; the answer stays under way for ``combine``.

        For decoder loops that do other work in between, such as another micro-batch's attention.
        """
        x_TD = x.reshape(-1, x.shape[-1])
        experts_TK, weights_TK = self.router(x_TD)
        ticket = self.experts.dispatch(x_TD, experts_TK, weights_TK)
        # the shared expert runs while the answer is under way
        shared_TD = self.shared(x_TD) if self.shared is not None else None
        return UnderWay(ticket, shared_TD, x.shape)

    def combine(self, under_way: UnderWay) -> Tensor:
        """Wait for what ``dispatch`` sent; return the layer's output, of the shape of its input."""
        # an argument, not a sum outside: so no compiler moves the wait above the shared expert
        sum_TD = self.experts.combine(under_way.ticket, add=under_way.shared_TD)
        return sum_TD.view(under_way.shape)


class _ForwardOnly(torch.autograd.Function):
    """Passes a tensor on, and raises where a gradient would have to come back."""

    @staticmethod
    def forward(ctx: Any, sum_TD: Tensor, anchor: Tensor) -> Tensor:
        return sum_TD

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise InferenceOnlyError(
            "remote experts run forward only: their servers keep nothing for a backward pass; "
            "call the model under torch.no_grad(), or train with local experts"
        )


def _forward_only(sum_TD: Tensor) -> Tensor:
    anchor = torch.zeros((), requires_grad=True)
    out: Tensor = _ForwardOnly.apply(sum_TD, anchor)  # type: ignore[no-untyped-call]  # torch's
    return out
