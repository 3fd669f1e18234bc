"""The plain twins: what each op computes, in PyTorch, on CPU tensors.

Shape legend: S slots, T tokens, K experts per token, R = S * T * K rows (one per token and expert,
token-major), G groups (one per (layer, expert) held), D hidden, I intermediate, A active groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from torch_eaas.ops.grouping import sorted_rows
from torch_eaas.ops.quantize import dequantize_blocks, quantize_blocks
from torch_eaas.protocol.layout import SCALE_COLUMNS


def swiglu_ref(gate_up_R2I: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of rows that hold gate and up side by side.

    Args:
        gate_up_R2I: ``(R, 2 I)``: the gate's half first.

    Returns:
        ``(R, I)``, of the input's dtype.
    """
    gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
    return F.silu(gate_RI).mul_(up_RI)


def pack_ref(
    ids_STK: Tensor, layers_S: Tensor, num_tokens_S: Tensor, groups_LE: Tensor, num_groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Define ``torch_eaas.ops.pack``: see there."""
    layers, experts = groups_LE.shape
    known_STK = ((ids_STK >= 0) & (ids_STK < experts)) & (
        torch.arange(ids_STK.shape[1])[:, None] < num_tokens_S[:, None, None]
    )
    known_STK &= ((layers_S >= 0) & (layers_S < layers))[:, None, None]
    layers_STK = layers_S[:, None, None].expand(ids_STK.shape)
    groups_STK = torch.full_like(ids_STK, -1)
    groups_STK[known_STK] = groups_LE[layers_STK[known_STK], ids_STK[known_STK]]
    groups_STK[groups_STK >= num_groups] = -1
    order, active, counts = sorted_rows(groups_STK.flatten().long().numpy())
    order_N = torch.from_numpy(order).int()
    counts_G = torch.zeros(num_groups, dtype=torch.int32)
    counts_G[active] = torch.tensor(counts, dtype=torch.int32)
    rows_R = torch.full((ids_STK.numel(),), -1, dtype=torch.int32)
    rows_R[: len(order_N)] = order_N
    places_R = torch.full_like(rows_R, -1)
    places_R[order_N] = torch.arange(len(order_N), dtype=torch.int32)
    return rows_R, places_R.view(ids_STK.shape), counts_G


def group_shrink_ref(counts_G: Tensor, block_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Define ``torch_eaas.ops.group_shrink``: see there."""
    tiles_G = -(-counts_G // block_rows)
    totals_3 = torch.stack([(counts_G > 0).sum(), tiles_G.sum(), counts_G.sum()])
    groups_A = counts_G.nonzero().flatten()
    starts = (counts_G.cumsum(0) - counts_G, tiles_G.cumsum(0) - tiles_G)
    lists = []
    for values_G, rest in ((None, -1), (starts[0], totals_3[2]), (starts[1], totals_3[1])):
        list_G = torch.full_like(counts_G, int(rest))
        list_G[: len(groups_A)] = groups_A if values_G is None else values_G[groups_A]
        lists.append(list_G)
    return lists[0], lists[1], lists[2], totals_3.int()


def swiglu_rows_ref(gate_up_R2I: Tensor, totals_3: Tensor | None) -> Tensor:
    """Define ``torch_eaas.ops.swiglu``: see there."""
    end = _num_rows(gate_up_R2I, totals_3)
    out_RI = gate_up_R2I.new_empty((gate_up_R2I.shape[0], gate_up_R2I.shape[1] // 2))
    out_RI[:end] = swiglu_ref(gate_up_R2I[:end].float()).to(out_RI.dtype)
    return out_RI


def swiglu_quantize_ref(gate_up_R2I: Tensor, totals_3: Tensor | None) -> tuple[Tensor, Tensor]:
    """Define ``torch_eaas.ops.swiglu_quantize``: see there."""
    end = _num_rows(gate_up_R2I, totals_3)
    stored_nI, scale_ni = quantize_blocks(swiglu_ref(gate_up_R2I[:end].float()), (1, 128))
    out_RI = stored_nI.new_empty((gate_up_R2I.shape[0], stored_nI.shape[1]))
    scale_Ri = scale_ni.new_empty((gate_up_R2I.shape[0], scale_ni.shape[1]))
    out_RI[:end] = stored_nI
    scale_Ri[:end] = scale_ni
    return out_RI, scale_Ri


def quantize_rows_ref(
    x_MK: Tensor, block: int, num_tokens_S: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Define ``torch_eaas.ops.quantize_rows``: see there."""
    stored_MK, scale_Mk = quantize_blocks(x_MK, (1, block))
    held_m = _held_tokens(num_tokens_S, len(x_MK))
    out_MK, out_Mk = torch.empty_like(stored_MK), torch.empty_like(scale_Mk)
    out_MK[held_m] = stored_MK[held_m]
    out_Mk[held_m] = scale_Mk[held_m]
    return out_MK, out_Mk


def dequantize_rows_ref(
    x_MK: Tensor, scale_Mk: Tensor, num_tokens_S: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Define ``torch_eaas.ops.dequantize_rows``: see there."""
    held_m = _held_tokens(num_tokens_S, len(x_MK))
    out_MK = torch.empty_like(x_MK, dtype=dtype)
    out_MK[held_m] = dequantize_blocks(x_MK[held_m], scale_Mk[held_m], (1, SCALE_COLUMNS)).to(dtype)
    return out_MK


def cast_rows_ref(x_MK: Tensor, dtype: torch.dtype, num_tokens_S: Tensor) -> Tensor:
    """Define ``casting.cast_rows``: see there."""
    held_m = _held_tokens(num_tokens_S, len(x_MK))
    out_MK = torch.empty_like(x_MK, dtype=dtype)
    out_MK[held_m] = x_MK[held_m].to(dtype)
    return out_MK


def combine_rows_ref(
    rows_ND: Tensor,
    places_TK: Tensor,
    weights_TK: Tensor,
    per_expert: bool,
    num_tokens_S: Tensor | None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Define ``torch_eaas.ops.combine_rows``: see there."""
    (num_tokens, top_k), hidden = places_TK.shape, rows_ND.shape[1]
    held_t = _held_tokens(num_tokens_S, num_tokens)
    shape = (num_tokens, top_k, hidden) if per_expert else (num_tokens, hidden)
    out = rows_ND.new_empty(shape, dtype=torch.float32)
    out[held_t] = 0.0
    for k in range(top_k):
        tokens_n = held_t[places_TK[held_t, k] >= 0]
        weighted_nD = rows_ND[places_TK[tokens_n, k]].float() * weights_TK[tokens_n, k, None]
        if per_expert:
            out[tokens_n, k] = weighted_nD
        else:
            out[tokens_n] += weighted_nD
    return out.to(out_dtype)


def _num_rows(rows: Tensor, totals_3: Tensor | None) -> int:
    return len(rows) if totals_3 is None else min(int(totals_3[2]), len(rows))


def _held_tokens(num_tokens_S: Tensor | None, num_tokens: int) -> Tensor:
    """Return the numbers of the tokens that slots hold."""
    if num_tokens_S is None:
        return torch.arange(num_tokens)
    within_T = torch.arange(num_tokens // len(num_tokens_S))
    return (within_T < num_tokens_S[:, None]).flatten().nonzero().flatten()


def grouped_gemm_ref(
    x_MK: Tensor,
    weights_SNK: Tensor,
    counts_G: Tensor,
    *,
    rows_R: Tensor | None = None,
    gather_div: int = 1,
    slots_G: Tensor | None = None,
) -> Tensor:
    """Define ``torch_eaas.ops.grouped_gemm``: see there."""
    num_rows = x_MK.shape[0] if rows_R is None else rows_R.shape[0]
    out_RN = x_MK.new_empty((num_rows, weights_SNK.shape[1]))
    sources_R = torch.arange(num_rows) if rows_R is None else rows_R // gather_div
    for here, slot in _active_slots(counts_G, slots_G, weights_SNK.shape[0]):
        if slot is None:
            out_RN[here] = float("nan")
        else:
            out_RN[here] = F.linear(x_MK[sources_R[here]].float(), weights_SNK[slot].float()).to(
                out_RN.dtype
            )
    return out_RN


def grouped_gemm_fp8_ref(
    x: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    counts_G: Tensor,
    *,
    rows_R: Tensor | None = None,
    gather_div: int = 1,
    slots_G: Tensor | None = None,
) -> Tensor:
    """Define ``torch_eaas.ops.grouped_gemm_fp8``, in fp32: see there."""
    x_MK = dequantize_blocks(*x, (1, 128))
    num_rows = x_MK.shape[0] if rows_R is None else rows_R.shape[0]
    out_RN = x_MK.new_empty((num_rows, weights[0].shape[1]))
    sources_R = torch.arange(num_rows) if rows_R is None else rows_R // gather_div
    for here, slot in _active_slots(counts_G, slots_G, weights[0].shape[0]):
        if slot is None:
            out_RN[here] = float("nan")
        else:
            weight_NK = dequantize_blocks(weights[0][slot], weights[1][slot], (128, 128))
            out_RN[here] = F.linear(x_MK[sources_R[here]], weight_NK)
    return out_RN


def _active_slots(
    counts_G: Tensor, slots_G: Tensor | None, num_slots: int
) -> Iterator[tuple[slice, int | None]]:
    """Yield each active group's packed rows, and its slot or None where the slab has none."""
    start = 0
    for group, count in enumerate(counts_G.tolist()):
        slot = group if slots_G is None else int(slots_G[group])
        if count:
            yield slice(start, start + count), slot if 0 <= slot < num_slots else None
        start += count
