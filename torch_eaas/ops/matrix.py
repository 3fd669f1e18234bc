"""Weight matrices as a CPU keeps them: laid out for its products, with no plain copy beside.

Which layout is best depends on the CPU and the dtype alone, so that servers on one kind of machine
agree in every bit. The packing ops are torch's own but not public: each is tried once, on a small
matrix, and where it is missing the plain matrix does.

Shape suffixes: R rows, D inputs, N outputs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from typing_extensions import override

from torch_eaas.ops.quantize import dequantize_blocks

ROW_MULTIPLE = 4
"""To what rows are padded: fp32 products of 1 to 3 rows give other bits, and with several threads
the last 1 to 3 rows of a larger product do too."""

_TILE_NUMBERS = 1 << 18
"""A matrix that must be cast first is cast in pieces of about so many numbers: they stay in the
cache, and malloc keeps their memory, where large blocks cost a page fault for each page."""

_HALF_BLOCK = 512
"""FBGEMM's layout has room for a multiple of so many inputs."""


class Matrix(Protocol):
    """A matrix ``(N, D)``, ready to be multiplied with."""

    dtype: torch.dtype
    """What the rows that it is given must be, and what it answers."""

    num_outputs: int
    """N."""

    def multiply(self, x_RD: Tensor, *, deterministic: bool) -> Tensor:
        """Multiply rows with the transpose.

        Args:
            x_RD: At least one row, ``(R, D)``, of ``dtype``.
            deterministic: A row's bits depend on itself alone, not on the other rows.

        Returns:
            ``(R, N)``.
        """
        ...


def keep_matrix(weight_ND: Tensor) -> Matrix:
    """Lay out an fp32 or bf16 matrix as this CPU multiplies fastest.

    Args:
        weight_ND: The matrix, ``(N, D)``; it is copied where the layout is another.

    Returns:
        fp32: the transpose, which BLAS multiplies faster with up to three rows. bf16: oneDNN's
        blocks where the CPU multiplies bf16, else FBGEMM's fp16 panels, which take fp32 rows. The
        plain matrix where torch lacks these, or where their padding would cost more than a third.

    Example:
        ``keep_matrix(torch.tensor([[3.0]])).multiply(torch.tensor([[2.0]]), deterministic=True)``
        gives ``[[6.]]``.
    """
    if weight_ND.dtype == torch.float32:
        return TransposedMatrix(weight_ND)
    if multiplies_bf16():
        return BlockedMatrix(weight_ND) if _has_blocks() else PlainMatrix(weight_ND, torch.bfloat16)
    padded = -(-weight_ND.shape[1] // _HALF_BLOCK) * _HALF_BLOCK
    if 3 * padded <= 4 * weight_ND.shape[1] and _has_halves() and weight_ND.isfinite().all():
        return HalfMatrix(weight_ND)
    return PlainMatrix(weight_ND, torch.float32)


class PlainMatrix(Matrix):
    """A matrix as it is given, cast for each use where rows are of another dtype.

    Args:
        weight_ND: The matrix, ``(N, D)``; not copied.
        dtype: The rows' dtype.
    """

    def __init__(self, weight_ND: Tensor, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.num_outputs, num_inputs = weight_ND.shape
        self._tiles = [weight_ND]
        if weight_ND.dtype != dtype:
            self._tiles = list(torch.split(weight_ND, max(1, _TILE_NUMBERS // max(1, num_inputs))))

    @override
    def multiply(self, x_RD: Tensor, *, deterministic: bool) -> Tensor:
        num_rows = x_RD.shape[0]
        rows_RD = _padded(x_RD, -num_rows % ROW_MULTIPLE) if deterministic else x_RD
        parts = [F.linear(rows_RD, tile_ND.to(self.dtype)) for tile_ND in self._tiles]
        return _joined(parts)[:num_rows]


class TransposedMatrix(Matrix):
    """A matrix that is kept as its transpose.

    Args:
        weight_ND: The matrix, ``(N, D)``; copied.
    """

    def __init__(self, weight_ND: Tensor) -> None:
        self.dtype = weight_ND.dtype
        self.num_outputs = weight_ND.shape[0]
        self._weight_DN = weight_ND.t().contiguous()

    @override
    def multiply(self, x_RD: Tensor, *, deterministic: bool) -> Tensor:
        num_rows = x_RD.shape[0]
        rows_RD = _padded(x_RD, -num_rows % ROW_MULTIPLE) if deterministic else x_RD
        return torch.mm(rows_RD, self._weight_DN)[:num_rows]


class BlockedMatrix(Matrix):
    """A matrix in oneDNN's blocks.

    Args:
        weight_ND: The matrix, ``(N, D)``, fp32 or bf16; copied.
    """

    def __init__(self, weight_ND: Tensor) -> None:
        self.dtype = weight_ND.dtype
        self.num_outputs = weight_ND.shape[0]
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(weight_ND.contiguous(), None)

    @override
    def multiply(self, x_RD: Tensor, *, deterministic: bool) -> Tensor:
        num_rows = x_RD.shape[0]
        rows_RD = _padded(x_RD, -num_rows % ROW_MULTIPLE) if deterministic else x_RD
        multiply = torch.ops.mkldnn._linear_pointwise.default
        out_RN: Tensor = multiply(rows_RD, self._blocks, None, "none", [], "")
        return out_RN[:num_rows]


class HalfMatrix(Matrix):
    """A bf16 matrix as fp16, in FBGEMM's panels: for x86 without bf16 products, reads half of fp32.

    bf16 has 8 significant bits and fp16 has 11, so numbers down to 2^-17 lose nothing, and smaller
    ones are kept to within 2^-25. A matrix whose largest number is beyond fp16, or below 2^-8, is
    scaled by a power of two, and so are its products.

    Args:
        weight_ND: The matrix, ``(N, D)``, finite; copied.
    """

    def __init__(self, weight_ND: Tensor) -> None:
        self.dtype = torch.float32
        self.num_outputs = weight_ND.shape[0]
        largest = float(weight_ND.abs().max())
        is_ordinary = largest == 0 or 2.0**-8 <= largest <= 2.0**15
        self._exponent = 0 if is_ordinary else 15 - math.frexp(largest)[1]
        scaled_ND = torch.ldexp(weight_ND.float(), torch.tensor(self._exponent))
        # one way into FBGEMM takes 2 us a call and knows no threads, the other takes 20
        if torch.get_num_threads() == 1 and _has_quick_halves():
            quick = torch.fbgemm_linear_fp16_weight_fp32_activation
            panels = torch.fbgemm_pack_gemm_matrix_fp16(scaled_ND)
            self._product: Callable[[Tensor], Tensor] = lambda x_RD: quick(x_RD, panels, None)
        else:
            threaded = torch.ops.quantized.linear_dynamic_fp16.default
            packed = torch.ops.quantized.linear_prepack_fp16(scaled_ND, None)
            self._product = lambda x_RD: threaded(x_RD, packed)

    @override
    def multiply(self, x_RD: Tensor, *, deterministic: bool) -> Tensor:
        # FBGEMM takes rows by sixes; its kernels for one row and for two sum in another order
        num_rows = x_RD.shape[0]
        rows_RD = _padded(x_RD, (0, 2, 1, 0, 0, 0)[num_rows % 6]) if deterministic else x_RD
        out_RN = self._product(rows_RD)
        if self._exponent:
            out_RN = torch.ldexp(out_RN, torch.tensor(-self._exponent))
        return out_RN[:num_rows]


class Fp8Matrix(Matrix):
    """A block-scaled FP8 matrix, dequantized for each use: it saves memory, not time.

    Args:
        parts: Matrices that are stacked, each float8_e4m3fn with its block scales; not copied.
        block: Rows and columns that share one scale.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]], block: tuple[int, int]) -> None:
        self.dtype = torch.float32
        self.num_outputs = sum(len(weight_ND) for weight_ND, _ in parts)
        self._block = block
        self._tiles: list[tuple[Tensor, Tensor]] = []
        for weight_ND, scale in parts:
            num_blocks = max(1, _TILE_NUMBERS // (weight_ND.shape[1] * block[0]))
            rows = torch.split(weight_ND, num_blocks * block[0])
            self._tiles += zip(rows, torch.split(scale, num_blocks), strict=True)

    @override
    def multiply(self, x_RD: Tensor, *, deterministic: bool) -> Tensor:
        num_rows = x_RD.shape[0]
        rows_RD = _padded(x_RD, -num_rows % ROW_MULTIPLE) if deterministic else x_RD
        parts = [
            F.linear(rows_RD, dequantize_blocks(tile_ND, scale, self._block))
            for tile_ND, scale in self._tiles
        ]
        return _joined(parts)[:num_rows]


@cache
def multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for bf16 products, and torch uses them."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # oneDNN also takes AVX-512 without them, and then emulates
    return not torch.cpu._is_avx512_supported() or torch.cpu._is_avx512_bf16_supported()


@cache
def _has_quick_halves() -> bool:
    # torch warns once in a process that these will go
    with warnings.catch_warnings(action="ignore"):
        try:
            panels = torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(1, 1))
            torch.fbgemm_linear_fp16_weight_fp32_activation(torch.ones(1, 1), panels, None)
        except (AttributeError, RuntimeError):
            return False
    return True


@cache
def _has_blocks() -> bool:
    return _multiplies(BlockedMatrix)


@cache
def _has_halves() -> bool:
    return _multiplies(HalfMatrix)


def _multiplies(kind: type[BlockedMatrix | HalfMatrix]) -> bool:
    """Return whether a small matrix of this kind can be made, and multiplies rightly."""
    rows_RD = torch.arange(24.0).view(4, 6)
    try:
        matrix = kind(torch.eye(5, 6, dtype=torch.bfloat16))
        out_RN = matrix.multiply(rows_RD.to(matrix.dtype), deterministic=True)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(out_RN.float(), rows_RD[:, :5])


def _padded(x_RD: Tensor, missing: int) -> Tensor:
    return F.pad(x_RD, (0, 0, 0, missing)) if missing else x_RD


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
