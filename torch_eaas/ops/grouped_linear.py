"""Rows times matrices, group by group, on a CPU: only the matrices that have rows are read.

Shape suffixes: R rows sorted by group, D inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from torch_eaas.ops.matrix import Matrix, PlainMatrix


def grouped_linear(
    x_RD: Tensor,
    weights: Sequence[Tensor | Matrix],
    counts: Sequence[int],
    *,
    deterministic: bool = True,
) -> Tensor:
    """Multiply each group's rows with the transpose of its matrix.

    Args:
        x_RD: Rows sorted by group, ``(R, D)``.
        weights: One matrix ``(N, D)`` for each group, plain or as ``keep_matrix`` laid it out; a
            plain one is cast to ``x_RD``'s dtype where it is another.
        counts: Rows of each group; they sum to R.
        deterministic: Pad each group, so that a row's bits depend on itself alone.

    Returns:
        ``(R, N)``, of ``x_RD``'s dtype.

    Example:
        Rows ``[[1.], [2.]]`` with counts ``[1, 1]`` and matrices ``[[3.]]``, ``[[5.]]`` give
        ``[[3.], [10.]]``.
    """
    matrices = [
        PlainMatrix(weight, x_RD.dtype) if isinstance(weight, Tensor) else weight
        for weight in weights
    ]
    num_outputs = matrices[0].num_outputs if matrices else 0
    out_RN = x_RD.new_empty((x_RD.shape[0], num_outputs))
    sizes = list(counts)
    for x_nD, out_nN, matrix in zip(
        torch.split(x_RD, sizes), torch.split(out_RN, sizes), matrices, strict=True
    ):
        num_rows = x_nD.shape[0]
        missing = matrix.missing(num_rows) if deterministic else 0
        if missing:
            padded = x_nD.new_empty((num_rows + missing, num_outputs))
            matrix.multiply(F.pad(x_nD, (0, 0, 0, missing)), padded)
            out_nN.copy_(padded[:num_rows])
        elif num_rows:
            matrix.multiply(x_nD, out_nN)
    return out_RN
