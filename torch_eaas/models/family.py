"""What the loader must know of one kind of model, as data."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """The sizes of a model's routed experts; what client and server must agree on."""

    hidden_size: int
    """Width D of a token's hidden state."""

    intermediate_size: int
    """Width I inside one routed expert."""

    moe_layers: tuple[int, ...]
    """The layers that have routed experts, by the model's own count, which begins with 0."""

    num_experts: int
    """Routed experts per layer, E."""

    top_k: int
    """Experts per token, K."""

    fingerprint: str
    """Tells one checkpoint from another: 16 hex digits over its config and its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The names and rules of the models of one ``model_type``."""

    experts: str
    """The module of a layer's routed experts, with ``{layer}``; also their prefix on disk."""

    projections: tuple[str, str, str]
    """An expert's gate, up and down projection below that prefix and the expert's number."""

    fp32: tuple[str, ...]
    """How the names of those tensors end that stay fp32 in a model of any dtype."""

    ignored: tuple[str, ...]
    """How the names of those tensors end that old checkpoints hold and nobody needs."""

    read_shape: Callable[[Mapping[str, Any], str], MoeShape]
    """Makes the sizes from ``config.json`` and the fingerprint; raises ConfigError."""

    mtp_layer: Callable[[str, Mapping[str, Any]], int | None]
    """Gives the layer of a tensor of multi-token prediction, and None for every other."""

    def expert_names(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Return the names on disk of one expert's gate, up and down projection."""
        prefix = f"{self.experts.format(layer=layer)}.{expert}"
        gate, up, down = (f"{prefix}.{projection}.weight" for projection in self.projections)
        return gate, up, down

    def expert_shapes(self, shape: MoeShape, layers: Iterable[int]) -> dict[str, tuple[int, int]]:
        """Return the name and shape of every projection of those layers' experts."""
        wide = (shape.intermediate_size, shape.hidden_size)
        tall = (shape.hidden_size, shape.intermediate_size)
        shapes: dict[str, tuple[int, int]] = {}
        for layer in layers:
            for expert in range(shape.num_experts):
                gate, up, down = self.expert_names(layer, expert)
                shapes |= {gate: wide, up: wide, down: tall}
        return shapes
