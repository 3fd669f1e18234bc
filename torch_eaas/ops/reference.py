"""The plain twins: what each op computes, in PyTorch. They are also the CPU implementation.

Shape legend: T tokens, K experts per token, R = T * K rows (one per token and expert, token-major),
G groups (one per (layer, expert) held), D hidden, I intermediate, A active groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from torch_eaas.ops.quantize import quantize_blocks


def pack_ref(groups_R: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sort rows by group, stably; rows of group -1 belong to nobody and come last.

    Args:
        groups_R: Group of each row, ``(R,)`` int64, -1 for none.
        num_groups: G.

    Returns:
        The rows in their new order, ``(R,)`` int64, and the rows per group, ``(G,)`` int64.

    Example:
        ``groups=[2, -1, 0, 2]`` and 3 groups give ``order=[2, 0, 3, 1]``, ``counts=[1, 0, 2]``.
    """
    keys_R = torch.where(groups_R < 0, num_groups, groups_R)
    counts = torch.bincount(keys_R, minlength=num_groups + 1)
    return torch.argsort(keys_R, stable=True), counts[:num_groups]


def group_shrink_ref(counts_G: Tensor) -> tuple[Tensor, Tensor]:
    """Move the groups that have rows to the front, in order.

    Returns:
        The active groups, ``(G,)`` int64, filled up with -1, and their number, ``(1,)`` int64.

    Example:
        ``counts=[0, 3, 0, 5]`` gives ``groups=[1, 3, -1, -1]`` and ``num_groups=[2]``.
    """
    active = counts_G.nonzero().flatten()
    groups_G = counts_G.new_full(counts_G.shape, -1)
    groups_G[: active.numel()] = active
    return groups_G, counts_G.new_tensor([active.numel()])


def swiglu_ref(gate_up_R2I: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of rows that hold gate and up side by side.

    Args:
        gate_up_R2I: ``(R, 2 I)``: the gate's half first.

    Returns:
        ``(R, I)``, of the input's dtype.
    """
    gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
    return F.silu(gate_RI).mul_(up_RI)


def combine_ref(
    rows_ND: Tensor, order_R: Tensor, weights_TK: Tensor, *, per_expert: bool
) -> Tensor:
    """Weight the experts' rows and bring them back into token order.

    Args:
        rows_ND: Experts' outputs in group order, ``(N, D)``; N rows belong to a group.
        order_R: The order that ``pack_ref`` gave, ``(R,)``; its first N entries are used.
        weights_TK: Final router weights, ``(T, K)`` fp32; those beside what no group computed
            are not looked at.
        per_expert: Return one row per (token, expert) instead of their sum per token.

    Returns:
        fp32: ``(T, D)`` sums in order of groups, or ``(T, K, D)`` rows. What no group computed is
        zero.
    """
    num_tokens, top_k = weights_TK.shape
    num_rows, hidden = rows_ND.shape
    order_N = order_R[:num_rows]
    weighted_ND = rows_ND.float() * weights_TK.reshape(-1)[order_N].unsqueeze(1)
    if per_expert:
        out_RD = torch.zeros((num_tokens * top_k, hidden), dtype=torch.float32)
        out_RD[order_N] = weighted_ND
        return out_RD.view(num_tokens, top_k, hidden)
    sum_TD = torch.zeros((num_tokens, hidden), dtype=torch.float32)
    return sum_TD.index_add_(0, order_N // top_k, weighted_ND)


# -- the twins of the device ops, which take counts on the device --------------------------------


def pack_slots_ref(
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
    order_R, counts_G = pack_ref(groups_STK.flatten().long(), num_groups)
    order_N = order_R[: int(counts_G.sum())].int()
    rows_R = torch.full((ids_STK.numel(),), -1, dtype=torch.int32)
    rows_R[: len(order_N)] = order_N
    places_R = torch.full_like(rows_R, -1)
    places_R[order_N] = torch.arange(len(order_N), dtype=torch.int32)
    return rows_R, places_R.view(ids_STK.shape), counts_G.int()


def shrink_groups_ref(counts_G: Tensor, block_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def combine_rows_ref(
    rows_ND: Tensor,
    places_TK: Tensor,
    weights_TK: Tensor,
    per_expert: bool,
    num_tokens_S: Tensor | None,
) -> Tensor:
    """Define ``torch_eaas.ops.combine``: see there."""
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
    return out


def _num_rows(rows: Tensor, totals_3: Tensor | None) -> int:
    return len(rows) if totals_3 is None else min(int(totals_3[2]), len(rows))


def _held_tokens(num_tokens_S: Tensor | None, num_tokens: int) -> Tensor:
    """Return the numbers of the tokens that slots hold."""
    if num_tokens_S is None:
        return torch.arange(num_tokens)
    within_T = torch.arange(num_tokens // len(num_tokens_S))
    return (within_T < num_tokens_S[:, None]).flatten().nonzero().flatten()
