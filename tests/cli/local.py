"""What the processes' text must be: transformers' own generate with local experts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from launched import SHAKESPEARE

from torch_eaas.models.load import load_local


def continuation(prompt: str, tokens: int, **sampling: Any) -> str:
    """Return the prompt and what follows it; ``seed`` and ``temperature`` draw tokens."""
    ids = torch.tensor([list(prompt.encode())])
    options: dict[str, Any] = {"do_sample": False}
    if sampling:
        torch.manual_seed(sampling.pop("seed"))
        options = {"do_sample": True, "top_k": 0, **sampling}
    found = _model().generate(ids, max_new_tokens=tokens, pad_token_id=0, **options)
    return bytes(found[0].tolist()).decode(errors="replace")


@cache
def _model() -> Any:
    return load_local(SHAKESPEARE)
