"""Generate tokens with a model of transformers and note when each was there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_eaas.cli.phases import Mark

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """How the next token is chosen, and how many there will be."""

    max_new_tokens: int
    """Most tokens; fewer if the model ends its text."""

    temperature: float | None = None
    """Draw from the softmax at this temperature; None takes the likeliest token."""

    seed: int = 0
    """Of the drawing: the same seed and logits give the same text."""

    def __str__(self) -> str:
        if self.temperature is None:
            return "greedy"
        return f"drawn at temperature {self.temperature:g} with seed {self.seed}"


def decode(
    model: PreTrainedModel,
    prompt: Sequence[int],
    options: DecodingOptions,
    *,
    on_token: Callable[[int, int], None] = lambda count, token: None,
    counters: Callable[[], Mapping[str, int]] = dict,
) -> tuple[list[int], list[Mark]]:
    """Generate, and return the new tokens and when each was there.

    Args:
        model: The model, ``generate`` of which does the work.
        prompt: The ids to go on from.
        options: How.
        on_token: Told each new token at once, with the count of tokens so far.
        counters: Read at each token.
    """
    import transformers

    drawing = (
        {} if options.temperature is None else {"temperature": options.temperature, "top_k": 0}
    )
    settings = transformers.GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=options.temperature is not None,
        eos_token_id=model.generation_config.eos_token_id,
        # one sequence is never padded, but generate asks for an id where it knows an end
        pad_token_id=0,
        **drawing,
    )
    torch.manual_seed(options.seed)
    ids = torch.tensor([list(prompt)])
    stream = _Stream(on_token, counters)
    # a mixin's method, of which the type of the model knows nothing
    generate: Any = model.generate
    generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=stream)
    return stream.tokens, stream.marks


class _Stream:
    """Takes what ``generate`` hands out: the prompt first, then token by token."""

    def __init__(
        self, on_token: Callable[[int, int], None], counters: Callable[[], Mapping[str, int]]
    ) -> None:
        self.tokens: list[int] = []
        self.marks: list[Mark] = []
        self._on_token = on_token
        self._counters = counters
        self._prompt_is_past = False

    def put(self, value: Tensor) -> None:
        """Take a piece."""
        if not self._prompt_is_past:
            self._prompt_is_past = True
            return
        self.marks.append(Mark(time.monotonic(), self._counters()))
        self.tokens.append(int(value))
        self._on_token(len(self.tokens), self.tokens[-1])

    def end(self) -> None:
        """Nothing is left to do."""
