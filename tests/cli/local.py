"""What the processes' text must be: transformers' own generate with local experts."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from launched import SHAKESPEARE

from torch_eaas.models.load import load_local
from torch_eaas.ops.quantize import dequantize_blocks, quantize_blocks


def continuation(prompt: str, tokens: int, *, fp8: bool = False, **sampling: Any) -> str:
    """Return the prompt and what follows it.

    Args:
        prompt: What to go on from.
        tokens: How many.
        fp8: Round what goes into the experts as fp8 on the wire does.
        sampling: ``seed`` and ``temperature`` draw tokens.
    """
    ids = torch.tensor([list(prompt.encode())])
    options: dict[str, Any] = {"do_sample": False}
    if sampling:
        torch.manual_seed(sampling.pop("seed"))
        options = {"do_sample": True, "top_k": 0, **sampling}
    hooks = ExitStack()
    for name, module in _model().named_modules() if fp8 else ():
        if name.endswith(".mlp.experts"):
            hook = module.register_forward_pre_hook(_round_to_fp8)
            hooks.callback(hook.remove)
    with hooks:
        found = _model().generate(ids, max_new_tokens=tokens, pad_token_id=0, **options)
    return bytes(found[0].tolist()).decode(errors="replace")


def _round_to_fp8(experts: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    x_TD, *rest = inputs
    return dequantize_blocks(*quantize_blocks(x_TD, (1, 128)), (1, 128)), *rest


@cache
def _model() -> Any:
    return load_local(SHAKESPEARE)
