"""The plain twins: what each op computes, in PyTorch. They are also the CPU implementation.

Shape legend: T tokens, K experts per token, R = T * K rows (one per token and expert, token-major),
G groups (one per (layer, expert) held), D hidden, I intermediate, A active groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

ROW_MULTIPLE = 4
"""To what a group's rows are padded: fp32 products of 1 to 3 rows give other bits, and with
several threads the last 1 to 3 rows of a larger product do too."""


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


def grouped_gemm_ref(
    x_RD: Tensor, weights: Sequence[Tensor], counts: Sequence[int], *, deterministic: bool = True
) -> Tensor:
    """Multiply each group's rows with the transpose of its matrix.

    Args:
        x_RD: Rows sorted by group, ``(R, D)``.
        weights: One matrix ``(N, D)`` for each group; cast to ``x_RD``'s dtype where it is another.
        counts: Rows of each group; they sum to R.
        deterministic: Pad each group to a multiple of 4 rows, so that a row's bits depend on
            itself alone; a matrix is then read for four rows where it was for one.

    Returns:
        ``(R, N)``, of ``x_RD``'s dtype.

    Example:
        Rows ``[[1.], [2.]]`` with counts ``[1, 1]`` and matrices ``[[3.]]``, ``[[5.]]`` give
        ``[[3.], [10.]]``.
    """
    if not weights:
        return x_RD.new_empty((x_RD.shape[0], 0))
    out_RN = x_RD.new_empty((x_RD.shape[0], weights[0].shape[0]))
    sizes = list(counts)
    # one buffer for all casts: new ones of this size would cost a page fault for each of its pages
    cast_ND = torch.empty_like(weights[0], dtype=x_RD.dtype)
    for x_nD, out_nN, weight_ND in zip(
        torch.split(x_RD, sizes), torch.split(out_RN, sizes), weights, strict=True
    ):
        is_cast = weight_ND.dtype != x_RD.dtype
        matrix_ND = cast_ND.copy_(weight_ND) if is_cast else weight_ND
        missing = -len(x_nD) % ROW_MULTIPLE if deterministic else 0
        if missing:
            padded = F.pad(x_nD, (0, 0, 0, missing))
            out_nN.copy_(F.linear(padded, matrix_ND)[: len(x_nD)])
        else:
            torch.mm(x_nD, matrix_ND.t(), out=out_nN)
    return out_RN


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
