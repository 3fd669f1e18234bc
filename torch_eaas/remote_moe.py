"""MoE layers whose experts live in other processes.

Shape legend: T tokens, K experts per token, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from torch_eaas.config import check_at_least
from torch_eaas.errors import ConfigError, InferenceOnlyError
from torch_eaas.remote_ops import FORWARD_ONLY, RemoteClient, address_of

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps tokens ``(T, D)`` to expert ids and final weights, both ``(T, K)``."""


class Ticket(NamedTuple):
    """Stands for an answer under way; made by ``dispatch``, used up by ``combine``.

    One that is dropped instead gives its answer up, at the client's next dispatch.
    """

    number: Tensor
    """What the client knows it by, int64 ``(1,)``."""

    x_TD: Tensor
    experts_TK: Tensor
    weights_TK: Tensor
    """What was dispatched: it stays as it is until ``combine``, which may send it again."""


class RemoteExperts(nn.Module):
    """The routed experts of one layer, run by servers. Has no parameters; inference only.

    Args:
        client: Reaches the servers, a ``Client`` or, where tokens are on a device, a
            ``DeviceClient``. The caller owns and closes it.
        layer: The layer, as the servers number it.
        num_experts: Experts of this layer, E.
        top_k: Experts per token, K; must be the client's.
    """

    def __init__(self, client: RemoteClient, *, layer: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        check_at_least("layer", layer, 0)
        check_at_least("num_experts", num_experts, 1)
        if top_k != client.config.top_k:
            raise ConfigError(
                f"layer {layer} has top_k {top_k}, its client {client.config.top_k}; "
                f"give the client the model's top_k"
            )
        # all of them final: compiled code knows them by the address
        self.client: Final = client
        self.layer: Final = layer
        self.num_experts: Final = num_experts
        self.top_k: Final = top_k
        self._address: Final = address_of(client, layer, num_experts)

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, ``(T, D)``, in ``x_TD``'s dtype."""
        return self.combine(self.dispatch(x_TD, experts_TK, weights_TK))

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Ticket:
        """Send the tokens to their experts and return at once, with a ticket for ``combine``.

        Args:
            x_TD: Hidden states, ``(T, D)``.
            experts_TK: Expert ids, ``(T, K)``; -1 and ``num_experts`` mean "no expert".
            weights_TK: Final router weights, ``(T, K)``.

        Returns:
            A ticket, to be combined once.
        """
        if torch.compiler.is_compiling():
            number = torch.ops.torch_eaas.dispatch(self._address, x_TD, experts_TK, weights_TK)
        else:
            number = self.client.dispatch(
                self.layer, x_TD, experts_TK, weights_TK, num_experts=self.num_experts
            )
        return Ticket(number, x_TD, experts_TK, weights_TK)

    def combine(self, ticket: Ticket, add: Tensor | None = None) -> Tensor:
        """Wait for a dispatch's answers; return their sum plus ``add``, ``(T, D)``.

        In a ``CapturedStep`` the device waits, and ``run`` answers for it. Else this
        blocks until every expert has answered: at most ``request_timeout``, and, for an expert
        whose holders are all gone or late by then, ``recovery_timeout`` more. A server that dies
        meanwhile is replaced where another holds its experts.
        """
        if torch.compiler.is_compiling():
            sum_TD: Tensor = torch.ops.torch_eaas.combine(self._address, *ticket, add)
            return sum_TD
        sum_TD = self.client.combine(ticket.number, add)
        if torch.is_grad_enabled():
            return _forward_only(sum_TD, ticket.x_TD, ticket.weights_TK, add)
        return sum_TD

    def extra_repr(self) -> str:
        """Return the numbers that ``repr`` shows."""
        return f"layer={self.layer}, num_experts={self.num_experts}, top_k={self.top_k}"


class UnderWay(NamedTuple):
    """A layer's call between its two halves; each is combined once."""

    ticket: Ticket
    shared_TD: Tensor | None
    shape: torch.Size


class RemoteMoE(nn.Module):
    """Route tokens, let remote experts run them, and add the shared expert's output.

    In a ``CapturedStep`` a step that failed is run again as a whole, so the model around this layer
    must be repeatable: it writes KV only at positions that the step owns, and advances nothing.

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
    """Passes the sum on, and raises where a gradient would have to come back."""

    @staticmethod
    def forward(ctx: Any, sum_TD: Tensor, *inputs: Tensor | None) -> Tensor:
        return sum_TD

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise InferenceOnlyError(FORWARD_ONLY)


def _forward_only(sum_TD: Tensor, *inputs: Tensor | None) -> Tensor:
    out: Tensor = _ForwardOnly.apply(sum_TD, *inputs)  # type: ignore[no-untyped-call]  # torch's
    return out
