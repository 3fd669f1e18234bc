"""Grouped GEMM over active groups: rows of many groups times the matrices of those that have rows.

Shape suffixes: M rows of x, R packed rows, K inputs, N outputs, k and n blocks of 128 of them,
S slots of the slab of matrices, G groups.

**Batch-invariant**, by default: a row's bits are the same alone and among others. One program adds
up a row's products over K, in a fixed order, and no configuration changes that order; nothing is
atomic. What is taken on trust is the tensor core: that a product's bits do not depend on the
width of the instruction, which is ``block_rows``. So keep ``block_rows`` fixed where bits matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.errors import ConfigError
from torch_eaas.ops.active_groups import ActiveGroups
from torch_eaas.ops.gemm_config import GemmConfig, check_block_rows, default_config
from torch_eaas.ops.gemm_kernel import launch
from torch_eaas.ops.launching import FLOATS, check_tensor, define_op
from torch_eaas.ops.reference import grouped_gemm_fp8_ref, grouped_gemm_ref

_OUT_DTYPES = (torch.bfloat16, torch.float32)


def grouped_gemm(
    x_MK: Tensor,
    weights_SNK: Tensor,
    groups: ActiveGroups,
    *,
    rows_R: Tensor | None = None,
    gather_div: int = 1,
    config: GemmConfig | None = None,
) -> Tensor:
    """Multiply each group's rows with the transpose of its matrix; only active groups cost time.

    The host waits for nothing, and the launch depends on shapes alone, so CUDA graphs replay it
    with other counts, rows and slots.

    Args:
        x_MK: Rows, ``(M, K)``, bf16, fp16 or fp32: packed by group, or in any order with
            ``rows_R``. Fast where a row is a multiple of 16 bytes; else right, and slow.
        weights_SNK: The slab of matrices, ``(S, N, K)``, of ``x_MK``'s dtype.
        groups: What ``ActiveGroups.of`` made of the counts.
        rows_R: For each packed row the row of ``x_MK``, times ``gather_div``, ``(R,)`` int32.
        gather_div: How many entries of ``rows_R`` share one row: top-k, where ``rows_R`` numbers
            (token, expert) pairs and ``x_MK`` holds tokens.
        config: The tiles; None: ``default_config``.

    Returns:
        ``(R, N)``, of ``x_MK``'s dtype, summed in fp32. Rows that belong to no group hold anything.

    Raises:
        ConfigError: A dtype, shape or layout does not fit the others.

    Example:
        Rows ``[[1.], [2.]]``, counts ``[0, 2]`` and matrices ``[[[3.]], [[5.]]]`` give
        ``[[5.], [10.]]``; with ``rows=[3, 0]`` and ``gather_div=2`` they give ``[[10.], [5.]]``.
    """
    check_tensor("x_MK", x_MK, FLOATS, 2)
    check_tensor("weights_SNK", weights_SNK, (x_MK.dtype,), 3)
    lists = _checked_lists(x_MK, weights_SNK, groups, rows_R, gather_div, config)
    out: Tensor = _op(x_MK, weights_SNK, *lists)
    return out


def grouped_gemm_fp8(
    x: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    groups: ActiveGroups,
    *,
    rows_R: Tensor | None = None,
    gather_div: int = 1,
    out_dtype: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
) -> Tensor:
    """Do the same with block-scaled FP8, as DeepSeek-R1's checkpoint stores it.

    Each 128 inputs are multiplied in FP8 and added up by the tensor core, then scaled and added
    to the sum in fp32.

    Args:
        x: Rows, ``(M, K)`` float8_e4m3fn, and a factor for each 128 of a row's numbers,
            ``(M, ceil(K / 128))`` fp32, as ``quantize_blocks(x_MK, (1, 128))`` gives them.
        weights: The slab, ``(S, N, K)`` float8_e4m3fn, and a factor for each block of 128 x 128,
            ``(S, ceil(N / 128), ceil(K / 128))`` fp32: the checkpoint's ``weight_scale_inv``.
        groups: What ``ActiveGroups.of`` made of the counts.
        rows_R: See ``grouped_gemm``.
        gather_div: See ``grouped_gemm``.
        out_dtype: bf16 or fp32.
        config: The tiles; None: ``default_config``.

    Returns:
        ``(R, N)``. Rows that belong to no group hold anything.

    Raises:
        ConfigError: A dtype, shape or layout does not fit the others, or the GPU knows no FP8.

    Example:
        The row ``[448.]`` with factor 2 and the matrix ``[[3.]]`` with factor 0.5 give ``[1344.]``.
    """
    (x_MK, x_scale_Mk), (weights_SNK, weight_scale_Snk) = x, weights
    for name, tensor, dtype, ndim in (
        ("x[0]", x_MK, torch.float8_e4m3fn, 2),
        ("x[1]", x_scale_Mk, torch.float32, 2),
        ("weights[0]", weights_SNK, torch.float8_e4m3fn, 3),
        ("weights[1]", weight_scale_Snk, torch.float32, 3),
    ):
        check_tensor(name, tensor, (dtype,), ndim)
    slots, outputs, inputs = weights_SNK.shape
    blocks_k, blocks_n = -(-inputs // 128), -(-outputs // 128)
    _check_shape("x[1]", x_scale_Mk, (x_MK.shape[0], blocks_k))
    _check_shape("weights[1]", weight_scale_Snk, (slots, blocks_n, blocks_k))
    if out_dtype not in _OUT_DTYPES:
        raise ConfigError(f"out_dtype must be torch.bfloat16 or torch.float32, got {out_dtype}")
    lists = _checked_lists(x_MK, weights_SNK, groups, rows_R, gather_div, config)
    out: Tensor = _op_fp8(x_MK, x_scale_Mk, weights_SNK, weight_scale_Snk, *lists, out_dtype)
    return out


def _checked_lists(
    x_MK: Tensor,
    weights_SNK: Tensor,
    groups: ActiveGroups,
    rows_R: Tensor | None,
    gather_div: int,
    config: GemmConfig | None,
) -> tuple[Any, ...]:
    """Return what both ops take after their numbers, in order."""
    if x_MK.shape[1] != weights_SNK.shape[2]:
        raise ConfigError(
            f"x_MK has {x_MK.shape[1]} inputs a row, but weights_SNK of shape "
            f"{tuple(weights_SNK.shape)} needs {weights_SNK.shape[2]}"
        )
    num_groups = groups.counts_G.shape[0]
    for name, tensor in zip(groups._fields, groups, strict=True):
        if isinstance(tensor, Tensor):
            check_tensor(name, tensor, (torch.int32,), 1)
            _check_shape(name, tensor, (3 if name == "totals_3" else num_groups,))
    if rows_R is not None:
        check_tensor("rows_R", rows_R, (torch.int32,), 1)
    check_at_least("gather_div", gather_div, 1)
    check_block_rows(groups.block_rows)
    tiles = config or default_config(groups.block_rows)
    return (
        rows_R,
        groups.slots_G,
        *groups[:5],
        gather_div,
        groups.block_rows,
        [tiles.block_n, tiles.stages, tiles.warps, tiles.programs, tiles.split_k],
    )


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ConfigError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")


def check_multiplies_fp8(device: torch.device) -> None:
    """Refuse a GPU whose tensor cores know no FP8.

    Raises:
        ConfigError: Its compute capability is below 8.9.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ConfigError(
            f"FP8 needs a GPU of compute capability 8.9 or more, {device} has {major}.{minor}; "
            "store the weights as bf16 and call grouped_gemm"
        )


def _kernel_fp8(
    x_MK: Tensor, x_scale_Mk: Tensor, weights_SNK: Tensor, weight_scale_Snk: Tensor, *rest: Any
) -> Tensor:
    check_multiplies_fp8(x_MK.device)
    *lists, out_dtype = rest
    scales = (x_scale_Mk, weight_scale_Snk)
    return launch(x_MK, weights_SNK, *lists, scales=scales, out_dtype=out_dtype)


def _twin(
    x_MK: Tensor,
    weights_SNK: Tensor,
    rows_R: Tensor | None,
    slots_G: Tensor | None,
    counts_G: Tensor,
    *lists: Any,
) -> Tensor:
    return grouped_gemm_ref(
        x_MK, weights_SNK, counts_G, rows_R=rows_R, slots_G=slots_G, gather_div=lists[4]
    )


def _twin_fp8(
    x_MK: Tensor,
    x_scale_Mk: Tensor,
    weights_SNK: Tensor,
    weight_scale_Snk: Tensor,
    rows_R: Tensor | None,
    slots_G: Tensor | None,
    counts_G: Tensor,
    *lists: Any,
) -> Tensor:
    x, weights = (x_MK, x_scale_Mk), (weights_SNK, weight_scale_Snk)
    out_RN = grouped_gemm_fp8_ref(
        x, weights, counts_G, rows_R=rows_R, slots_G=slots_G, gather_div=lists[4]
    )
    return out_RN.to(lists[-1])


def _fake(x_MK: Tensor, weights_SNK: Tensor, rows_R: Tensor | None, *lists: Any) -> Tensor:
    num_rows = x_MK.shape[0] if rows_R is None else rows_R.shape[0]
    return x_MK.new_empty((num_rows, weights_SNK.shape[1]))


def _fake_fp8(
    x_MK: Tensor,
    x_scale_Mk: Tensor,
    weights_SNK: Tensor,
    weight_scale_Snk: Tensor,
    rows_R: Tensor | None,
    *lists: Any,
) -> Tensor:
    num_rows = x_MK.shape[0] if rows_R is None else rows_R.shape[0]
    return x_MK.new_empty((num_rows, weights_SNK.shape[1]), dtype=lists[-1])


_LISTS = (
    "Tensor? rows_R, Tensor? slots_G, Tensor counts_G, Tensor active_G, Tensor offsets_G, "
    "Tensor tiles_G, Tensor totals_3, int gather_div, int block_rows, int[] config"
)
_op = define_op(
    f"grouped_gemm(Tensor x_MK, Tensor weights_SNK, {_LISTS}) -> Tensor",
    kernel=launch,
    twin=_twin,
    fake=_fake,
)
_op_fp8 = define_op(
    "grouped_gemm_fp8(Tensor x_MK, Tensor x_scale_Mk, Tensor weights_SNK, Tensor weight_scale_Snk, "
    f"{_LISTS}, ScalarType out_dtype) -> Tensor",
    kernel=_kernel_fp8,
    twin=_twin_fp8,
    fake=_fake_fp8,
)
