"""What a caller gives a client, checked and in the shape in which it travels.

Shape legend: T tokens, K experts per token, D hidden.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torch_eaas.client_calls import Call
from torch_eaas.client_pieces import check_ids
from torch_eaas.client_staging import Staging
from torch_eaas.config import ClientConfig
from torch_eaas.errors import AnomalyError, ConfigError
from torch_eaas.row_views import TORCH_DTYPES

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def new_call(
    config: ClientConfig,
    layer: int,
    num_experts: int,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    staging: Staging,
) -> Call:
    """Return a call of these tokens; ConfigError names what does not fit."""
    hidden, top_k = config.hidden_size, config.top_k
    shape = x_TD.shape
    if len(shape) != 2 or shape[1] != hidden or x_TD.dtype not in INPUT_DTYPES:
        raise ConfigError(
            f"layer {layer}: hidden states must be (T, {hidden}) in fp32, bf16 or fp16, "
            f"got {tuple(shape)} in {x_TD.dtype}"
        )
    expected = (shape[0], top_k)
    if ids_TK.shape != expected or weights_TK.shape != expected:
        raise ConfigError(
            f"layer {layer}: expert ids and weights must be {expected}, "
            f"got {tuple(ids_TK.shape)} and {tuple(weights_TK.shape)}"
        )
    x_wire = _plain(x_TD, TORCH_DTYPES[config.wire_dtype]).contiguous()
    ids_TK, weights_TK = _plain(ids_TK, torch.int64), _plain(weights_TK, torch.float32)
    if not (x_TD.is_cpu and ids_TK.is_cpu and weights_TK.is_cpu):
        x_wire, ids_TK, weights_TK = staging.to_host(layer, x_wire, ids_TK, weights_TK)
    if config.detect_anomalies:
        check_finite(f"layer {layer}", "a hidden state", x_TD)
    if x_wire.dtype != torch.float32:
        x_wire = x_wire.view(torch.int16)
    call = Call(
        layer,
        num_experts,
        x_wire.numpy(),
        check_ids(layer, ids_TK.numpy(), num_experts),
        weights_TK.numpy(),
        x_TD.dtype,
    )
    if not x_TD.is_cpu:
        call.send_home = partial(staging.to_device, device=x_TD.device)
    return call


def check_finite(where: str, what: str, rows_TD: Tensor) -> None:
    """Raise AnomalyError if a row has NaN or Inf; names the first such token."""
    bad_T = ~rows_TD.isfinite().all(-1)
    if bad_T.any():
        tokens = bad_T.nonzero().flatten().tolist()
        raise AnomalyError(
            f"{where}, token {tokens[0]}: {what} is not finite ({len(tokens)} of {len(bad_T)} "
            f"tokens)"
        )


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor's numbers in ``dtype``, without its history."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
