"""``torch_eaas::dispatch`` and ``torch_eaas::combine``: the two halves as torch sees them.

A compiler may move, merge or drop what it takes for arithmetic. These two have an effect elsewhere,
and say so, so a graph keeps each of them, once, in the order of the program. Between the two it
moves other work as it likes; therefore ``combine`` takes as an argument what is to be added.

No window is an argument: a compiler may hand an op a copy of any tensor. An *address* is one, and
may be copied: it names a client by a number, so that graphs are the same for all layers.

Shape legend: T tokens, K experts per token, D hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._library.effects import EffectType

from torch_eaas.config import ClientConfig
from torch_eaas.errors import ConfigError, InferenceOnlyError

FORWARD_ONLY = (
    "remote experts run forward only: their servers keep nothing for a backward pass; "
    "call the model under torch.no_grad(), or train with local experts"
)


class RemoteClient(Protocol):
    """Who reaches the servers: a ``Client`` or a ``DeviceClient``."""

    @property
    def config(self) -> ClientConfig:
        """Its options."""
        ...

    def dispatch(
        self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, num_experts: int
    ) -> Tensor:
        """Send a layer's tokens; return a ticket, int64 ``(1,)`` on the CPU."""
        ...

    def combine(self, ticket: Tensor, add: Tensor | None = None) -> Tensor:
        """Return the sum of the answers and ``add``, ``(T, D)``; it uses the ticket up."""
        ...


_CLIENTS: WeakValueDictionary[int, RemoteClient] = WeakValueDictionary()
_HANDLES = itertools.count(1)
_LIBRARY: Any = torch.library.Library(  # type: ignore[no-untyped-call]  # torch's
    "torch_eaas", "FRAGMENT"
)


def address_of(client: RemoteClient, layer: int, num_experts: int) -> Tensor:
    """Return what tells the ops whom to ask: client, layer and its experts, int64 ``(3,)``."""
    handle = next(_HANDLES)
    _CLIENTS[handle] = client
    # always on the CPU, also where modules are built for another device
    return torch.tensor([handle, layer, num_experts], device="cpu")


def _client_at(handle: int) -> RemoteClient:
    client = _CLIENTS.get(handle)
    if client is None:
        raise ConfigError(
            f"the client with handle {handle} no longer exists; keep it as long as what was "
            f"compiled with it, and compile anew for another"
        )
    return client


def _dispatch(address: Tensor, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Send the tokens; return the ticket's number, int64 ``(1,)``."""
    handle, layer, num_experts = address.tolist()
    client = _client_at(handle)
    return client.dispatch(layer, x_TD, experts_TK, weights_TK, num_experts=num_experts)


def _combine(
    address: Tensor,
    number: Tensor,
    x_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    add_TD: Tensor | None,
) -> Tensor:
    """Wait; return the sum plus ``add_TD``, ``(T, D)``.

    What was dispatched is an argument again: a failover reads it until now, and a compiler gives
    memory to others after the last use that it sees.
    """
    return _client_at(int(address[0])).combine(number, add_TD).contiguous()


def _refuse_backward(grad_TD: Tensor, shape: list[int]) -> Tensor:
    raise InferenceOnlyError(FORWARD_ONLY)


def _remember_shapes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shapes = [None if tensor is None else tensor.shape for tensor in inputs]


def _combine_backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    # an op of its own: a backward graph is traced also where nobody will run it
    return tuple(
        torch.ops.torch_eaas.refuse_backward(grad_TD, shape) if needed else None
        for needed, shape in zip(ctx.needs_input_grad, ctx.shapes, strict=True)
    )


def _register() -> None:
    """Tell torch of the ops; once, when this file is imported."""
    routed = "Tensor x, Tensor experts, Tensor weights"
    _define(
        f"dispatch(Tensor address, {routed}) -> Tensor",
        _dispatch,
        fake=lambda address, *routed: address.new_empty(1),
    )
    _define(
        f"combine(Tensor address, Tensor number, {routed}, Tensor? add) -> Tensor",
        _combine,
        fake=lambda address, number, x_TD, *rest: x_TD.new_empty(x_TD.shape),
    )
    _define(
        "refuse_backward(Tensor grad, SymInt[] shape) -> Tensor",
        _refuse_backward,
        fake=lambda grad_TD, shape: grad_TD.new_empty(shape),
    )
    for name in ("torch_eaas::dispatch", "torch_eaas::combine"):
        # no schema can say this, and torch has no public name for it yet
        torch.library._register_effectful_op(name, EffectType.ORDERED, lib=_LIBRARY)
    torch.library.register_autograd(
        "torch_eaas::combine", _combine_backward, setup_context=_remember_shapes, lib=_LIBRARY
    )


def _define(schema: str, kernel: Callable[..., Tensor], *, fake: Callable[..., Tensor]) -> None:
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    # for all devices: the client itself says which it can serve
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_eaas::{name}", fake, lib=_LIBRARY)


_register()
