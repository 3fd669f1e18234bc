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
from torch_eaas.ops.quantize import quantize_blocks
from torch_eaas.protocol.layout import SCALE_COLUMNS
from torch_eaas.row_views import TORCH_DTYPES, as_numpy

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
    _check_shapes(config, layer, x_TD, ids_TK, weights_TK)
    dtype = x_TD.dtype if config.wire_dtype == "fp8" else TORCH_DTYPES[config.wire_dtype]
    rows_TD = _plain(x_TD, dtype).contiguous()
    ids_TK, weights_TK = _plain(ids_TK, torch.int64), _plain(weights_TK, torch.float32)
    if not (x_TD.is_cpu and ids_TK.is_cpu and weights_TK.is_cpu):
        rows_TD, ids_TK, weights_TK = staging.to_host(layer, rows_TD, ids_TK, weights_TK)
    if config.detect_anomalies:
        check_finite(f"layer {layer}", "a hidden state", x_TD)
    scales_Td = None
    if config.wire_dtype == "fp8":
        # each token for itself: its bits depend on no other, so not on how a batch is cut
        rows_TD, scales_Td = quantize_blocks(rows_TD, (1, SCALE_COLUMNS))
    call = Call(
        layer,
        num_experts,
        as_numpy(rows_TD),
        check_ids(layer, ids_TK.numpy(), num_experts),
        weights_TK.numpy(),
        x_TD.dtype,
        None if scales_Td is None else scales_Td.numpy(),
    )
    if not x_TD.is_cpu:
        call.send_home = partial(staging.to_device, device=x_TD.device)
    return call


def _check_shapes(
    config: ClientConfig, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> None:
    hidden, shape = config.hidden_size, x_TD.shape
    if len(shape) != 2 or shape[1] != hidden or x_TD.dtype not in INPUT_DTYPES:
        raise ConfigError(
            f"layer {layer}: hidden states must be (T, {hidden}) in fp32, bf16 or fp16, "
            f"got {tuple(shape)} in {x_TD.dtype}"
        )
    expected = (shape[0], config.top_k)
    if ids_TK.shape != expected or weights_TK.shape != expected:
        raise ConfigError(
            f"layer {layer}: expert ids and weights must be {expected}, "
            f"got {tuple(ids_TK.shape)} and {tuple(weights_TK.shape)}"
        )


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
