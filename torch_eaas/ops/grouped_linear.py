"""Rows times matrices, group by group, on a CPU: only the matrices that have rows are read.

Shape suffixes: R rows sorted by group, D inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

ROW_MULTIPLE = 4
"""To what a group's rows are padded: fp32 products of 1 to 3 rows give other bits, and with
several threads the last 1 to 3 rows of a larger product do too."""


def grouped_linear(
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
