"""DeepSeek's block-scaled FP8: the plain definition.

A weight is cut into blocks of ``bn`` rows and ``bk`` columns, and each block is stored as
float8_e4m3fn beside one fp32 factor that brings it back. Blocks at the lower and right edge may be
smaller. The block size is always given, never derived from shapes: 192 rows under a grid of two
could be blocks of 128 and 64, or of 96 and 96, and only the checkpoint's config knows.

Shape suffixes: ``N`` rows (outputs), ``K`` columns (inputs), ``n`` and ``k`` blocks along them.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_eaas.errors import ConfigError

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantize_blocks(weight_NK: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Store a weight as FP8 with one scale for each block.

    Args:
        weight_NK: The weight, ``(N, K)``, of any floating dtype.
        block: Rows and columns of a block.

    Returns:
        The FP8 weight, ``(N, K)`` float8_e4m3fn, and its scales, ``(ceil(N / bn), ceil(K / bk))``
        fp32: a block's largest magnitude over 448, and 1 where a block is all zero.

    Raises:
        ConfigError: The weight is no matrix, or a block size is below 1.

    Example:
        ``[[448, 1], [896, 2]]`` in blocks of ``(1, 2)`` gives ``[[448, 1], [448, 1]]`` and the
        scales ``[[1], [2]]``.
    """
    _check(weight_NK, block)
    (num_rows, num_columns), (rows, columns) = weight_NK.shape, _grid(weight_NK.shape, block)
    missing = (0, columns * block[1] - num_columns, 0, rows * block[0] - num_rows)
    whole_NK = weight_NK.float()
    if any(missing):
        whole_NK = pad(whole_NK, missing)
    blocks = whole_NK.reshape(rows, block[0], columns, block[1])
    scaled = blocks.abs()
    scale_nk = scaled.amax(dim=(1, 3)) / FP8_MAX
    # also where the largest magnitude is so small that its scale is no fp32 number but zero
    scale_nk = torch.where(scale_nk == 0, 1.0, scale_nk)
    # into memory that is there: at many rows fresh pages cost more than the arithmetic
    torch.div(blocks, scale_nk[:, None, :, None], out=scaled)
    # a cast saturates on some devices only; rounding can put the largest value just above
    stored = scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(whole_NK.shape)
    return stored[:num_rows, :num_columns].contiguous(), scale_nk


def dequantize_blocks(weight_NK: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> Tensor:
    """Bring a block-scaled FP8 weight back to fp32.

    Args:
        weight_NK: The FP8 weight, ``(N, K)``.
        scale_inv: Each block's factor, ``(ceil(N / bn), ceil(K / bk))``.
        block: Rows and columns of a block.

    Returns:
        The weight, ``(N, K)`` fp32.

    Raises:
        ConfigError: The grid of scales does not fit the weight and the block.

    Example:
        ``[[448, 1], [448, 1]]`` with scales ``[[1], [2]]`` in blocks of ``(1, 2)`` gives
        ``[[448, 1], [896, 2]]``.
    """
    _check(weight_NK, block)
    expected = _grid(weight_NK.shape, block)
    if tuple(scale_inv.shape) != expected:
        raise ConfigError(
            f"scale_inv has shape {tuple(scale_inv.shape)}, but a weight of shape "
            f"{tuple(weight_NK.shape)} in blocks of {tuple(block)} needs {expected}; "
            "is this the weight_block_size of the checkpoint's config?"
        )
    out_NK = _parts_of_256(weight_NK)
    scale_nk = scale_inv.float() * 256
    rows, columns = expected
    if weight_NK.shape != (rows * block[0], columns * block[1]):
        return out_NK.mul_(_expand(scale_nk, weight_NK.shape, block))
    out_NK.view(rows, block[0], columns, block[1]).mul_(scale_nk.view(rows, 1, columns, 1))
    return out_NK


def _parts_of_256(weight_NK: Tensor) -> Tensor:
    """Return ``weight.float() / 256``, exactly, and ten times as fast as the cast alone.

    One byte ``s eeee mmm`` becomes the fp16 number ``s 0eeee mmm0000000``, which is 2^-8 of it,
    subnormals included; only NaN, all ones but for the sign, has another form.
    """
    if weight_NK.dtype != torch.float8_e4m3fn:
        return weight_NK.float() / 256
    bits_NK = weight_NK.contiguous().view(torch.int8)
    # a signed shift copies the sign into the bit below, where it is cleared
    halves_NK = bits_NK.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    out_NK = halves_NK.view(torch.float16).float()
    # as signed and as unsigned numbers, the two NaN are the largest
    if bits_NK.numel() and (bits_NK.max() == 0x7F or bits_NK.view(torch.uint8).max() == 0xFF):
        out_NK.masked_fill_(weight_NK.isnan(), torch.nan)
    return out_NK


def _check(weight_NK: Tensor, block: tuple[int, int]) -> None:
    if weight_NK.ndim != 2:
        raise ConfigError(f"weight must be a matrix, got shape {tuple(weight_NK.shape)}")
    if min(block) < 1:
        raise ConfigError(f"block sizes must be at least 1, got {tuple(block)}")


def _grid(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _expand(scale_nk: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    rows_Nk = scale_nk.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows_Nk.repeat_interleave(block[1], dim=1)[:, : shape[1]]
