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
from torch import Tensor
from typing_extensions import override

from torch_eaas.ops.quantize import dequantize_blocks

ROW_MULTIPLE = 4
"""To what rows are padded: fp32 products of 1 to 3 rows give other bits, and with several threads
the last 1 to 3 rows of a larger product do too."""

_TILE_NUMBERS = 1 << 18
"""A matrix that must be cast first is cast in pieces of about so many numbers: they stay in the
cache, and malloc keeps their memory, where large blocks cost a page fault for each page."""

_QUICK_THREADS = 2
"""So few threads are no faster than one: each product would wait for the other to wake up."""

_HALF_BLOCK = 512
"""FBGEMM's layout has room for a multiple of so many inputs."""


class Matrix(Protocol):
    """A matrix ``(N, D)``, ready to be multiplied with."""

    dtype: torch.dtype
    """What the rows that it is given must be, and what it answers."""

    num_outputs: int
    """N."""

    def missing(self, num_rows: int) -> int:
        """Return how many rows to add so that each row's bits depend on itself alone."""
        ...

    def multiply(self, x_RD: Tensor, out_RN: Tensor) -> None:
        """Multiply at least one row with the transpose.

        Args:
            x_RD: The rows, ``(R, D)``, of ``dtype``, contiguous.
            out_RN: Where the product goes, ``(R, N)``, of ``dtype``, contiguous.
        """
        ...


def keep_matrix(weight_ND: Tensor) -> Matrix:
    """Lay out an fp32 or bf16 matrix as this CPU multiplies fastest.

    Args:
        weight_ND: The matrix, ``(N, D)``; the plain matrix keeps it, the others copy it.

    Returns:
        fp32: the plain matrix, since no layout of oneDNN's is as fast with one row. bf16: oneDNN's
        blocks where the CPU multiplies bf16, else FBGEMM's fp16 panels, which take fp32 rows; the
        plain matrix where torch lacks these, or where their padding would cost more than a third.

    Example:
        ``grouped_linear(torch.tensor([[2.0]]), [keep_matrix(torch.tensor([[3.0]]))], [1])`` gives
        ``[[6.]]``.
    """
    if weight_ND.dtype == torch.float32:
        return PlainMatrix(weight_ND, torch.float32)
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
    def missing(self, num_rows: int) -> int:
        return -num_rows % ROW_MULTIPLE

    @override
    def multiply(self, x_RD: Tensor, out_RN: Tensor) -> None:
        at = 0
        for tile_nD in self._tiles:
            part_Rn = out_RN[:, at : (at := at + tile_nD.shape[0])]
            torch.mm(x_RD, tile_nD.to(self.dtype).t(), out=part_Rn)


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
    def missing(self, num_rows: int) -> int:
        return -num_rows % ROW_MULTIPLE

    @override
    def multiply(self, x_RD: Tensor, out_RN: Tensor) -> None:
        linear = torch.ops.mkldnn._linear_pointwise.default
        out_RN.copy_(linear(x_RD, self._blocks, None, "none", [], ""))


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
        self._multiply = _half_product(scaled_ND)

    @override
    def missing(self, num_rows: int) -> int:
        # FBGEMM takes rows by sixes; its kernels for one row and for two sum in another order
        return (0, 2, 1, 0, 0, 0)[num_rows % 6]

    @override
    def multiply(self, x_RD: Tensor, out_RN: Tensor) -> None:
        self._multiply(x_RD, out_RN)
        if self._exponent:
            torch.ldexp(out_RN, torch.tensor(-self._exponent), out=out_RN)


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
    def missing(self, num_rows: int) -> int:
        return -num_rows % ROW_MULTIPLE

    @override
    def multiply(self, x_RD: Tensor, out_RN: Tensor) -> None:
        at = 0
        for tile_nD, scale in self._tiles:
            part_Rn = out_RN[:, at : (at := at + tile_nD.shape[0])]
            torch.mm(x_RD, dequantize_blocks(tile_nD, scale, self._block).t(), out=part_Rn)


def _half_product(weight_ND: Tensor) -> Callable[[Tensor, Tensor], object]:
    """Return what multiplies rows with a matrix in FBGEMM's fp16 panels, into a given tensor."""
    # one way into FBGEMM takes 2 us a call and knows no threads, the other takes 20 and wakes them
    if torch.get_num_threads() <= _QUICK_THREADS and _has_quick_halves():
        quick = torch.fbgemm_linear_fp16_weight_fp32_activation
        panels = torch.fbgemm_pack_gemm_matrix_fp16(weight_ND)
        return lambda x_RD, out_RN: quick(x_RD, panels, None, out_RN)
    packed = torch.ops.quantized.linear_prepack_fp16(weight_ND, None)
    threaded = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x_RD, out_RN: out_RN.copy_(threaded(x_RD, packed))


@cache
def multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for bf16 products, and torch uses them."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # oneDNN also takes AVX-512 without them, and then emulates
    return not torch.cpu._is_avx512_supported() or torch.cpu._is_avx512_bf16_supported()


@cache
def _has_quick_halves() -> bool:
    one = torch.ones(1, 1)
    # torch warns once in a process that these will go
    with warnings.catch_warnings(action="ignore"):
        try:
            panels = torch.fbgemm_pack_gemm_matrix_fp16(one)
            torch.fbgemm_linear_fp16_weight_fp32_activation(one, panels, None, torch.empty(1, 1))
        except (AttributeError, RuntimeError, TypeError):
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
    x_RD = torch.arange(24.0).view(4, 6)
    try:
        matrix = kind(torch.eye(5, 6, dtype=torch.bfloat16))
        out_RN = torch.empty((4, 5), dtype=matrix.dtype)
        matrix.multiply(x_RD.to(matrix.dtype), out_RN)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(out_RN.float(), x_RD[:, :5])
