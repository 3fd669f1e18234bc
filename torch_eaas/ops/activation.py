"""SwiGLU between the two products of an expert, alone or with its result stored as FP8.

Shape suffixes: R rows, I intermediate, i blocks of 128 of it, B columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops.launching import FLOATS, blocks_on, check_tensor, define_op, on_device
from torch_eaas.ops.reference import swiglu_quantize_ref, swiglu_rows_ref
from torch_eaas.ops.row_quantizer import scale_tile

_ROWS = 4
_BLOCK = 128


def swiglu(gate_up_R2I: Tensor, totals_3: Tensor | None = None) -> Tensor:
    """Return ``silu(gate) * up`` of rows that hold gate and up side by side.

    Args:
        gate_up_R2I: ``(R, 2 I)``, the gate's half first, fp32, bf16 or fp16; computed in fp32.
        totals_3: What ``group_shrink`` gave: rows from ``totals_3[2]`` on are neither read nor
            written. All rows without it.

    Returns:
        ``(R, I)``, of the input's dtype.

    Raises:
        ConfigError: Another dtype, shape or layout, or an odd number of columns.

    Example:
        ``[[0, 2, 5, 3]]`` gives ``[[0, 5.28]]``: the gates 0 and 2 become 0 and 1.76.
    """
    _check(gate_up_R2I, totals_3)
    out_RI: Tensor = _swiglu_op(gate_up_R2I, totals_3)
    return out_RI


def swiglu_quantize(gate_up_R2I: Tensor, totals_3: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute ``swiglu`` and store it as FP8, without rounding to the input's dtype between.

    Args:
        gate_up_R2I: As in ``swiglu``.
        totals_3: As in ``swiglu``.

    Returns:
        ``(R, I)`` float8_e4m3fn and ``(R, ceil(I / 128))`` fp32 scales, as ``quantize_rows`` gives.

    Raises:
        ConfigError: As in ``swiglu``.

    Example:
        ``[[0, 2, 5, 3]]`` gives ``[[0, 448]]`` and the scale ``[[0.0118]]``, which is 5.28 / 448.
    """
    _check(gate_up_R2I, totals_3)
    out_RI, scale_Ri = _quantize_op(gate_up_R2I, totals_3)
    return out_RI, scale_Ri


def _check(gate_up_R2I: Tensor, totals_3: Tensor | None) -> None:
    check_tensor("gate_up_R2I", gate_up_R2I, FLOATS, 2)
    if gate_up_R2I.shape[1] % 2:
        raise ConfigError(
            f"gate_up_R2I must have a half for the gate and one for up, "
            f"got shape {tuple(gate_up_R2I.shape)}"
        )
    if totals_3 is not None:
        check_tensor("totals_3", totals_3, (torch.int32,), 1)
        if totals_3.shape[0] != 3:
            raise ConfigError(f"totals_3 must be group_shrink's, got shape {tuple(totals_3.shape)}")


def launch(gate_up_R2I: Tensor, totals_3: Tensor | None) -> Tensor:
    """Run the kernel without quantisation."""
    out_RI = _fake(gate_up_R2I, totals_3)
    launch_into(gate_up_R2I, totals_3, out_RI, None)
    return out_RI


def launch_quantize(gate_up_R2I: Tensor, totals_3: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the kernel with quantisation."""
    out_RI, scale_Ri = _fake_quantize(gate_up_R2I, totals_3)
    launch_into(gate_up_R2I, totals_3, out_RI, scale_Ri)
    return out_RI, scale_Ri


def launch_into(
    gate_up_R2I: Tensor, totals_3: Tensor | None, out_RI: Tensor, scale_Ri: Tensor | None
) -> None:
    """Run the kernel into tensors that are there; fp32 ``out_RI`` shows what a cast is given."""
    num_rows, size = out_RI.shape
    if out_RI.numel() == 0:
        return
    column_blocks = triton.cdiv(size, _BLOCK)
    walkers = triton.cdiv(blocks_on(out_RI.device, 32), column_blocks)
    with on_device(out_RI):
        _swiglu_kernel[(min(triton.cdiv(num_rows, _ROWS), walkers), column_blocks)](
            gate_up_R2I,
            totals_3,
            out_RI,
            scale_Ri,
            num_rows,
            size,
            ROWS=_ROWS,
            BLOCK=_BLOCK,
            num_warps=1,
        )


def _fake(gate_up_R2I: Tensor, totals_3: Tensor | None) -> Tensor:
    return gate_up_R2I.new_empty((gate_up_R2I.shape[0], gate_up_R2I.shape[1] // 2))


def _fake_quantize(gate_up_R2I: Tensor, totals_3: Tensor | None) -> tuple[Tensor, Tensor]:
    out_RI = torch.empty_like(_fake(gate_up_R2I, totals_3), dtype=torch.float8_e4m3fn)
    blocks = -(-out_RI.shape[1] // _BLOCK)
    return out_RI, out_RI.new_empty((out_RI.shape[0], blocks), dtype=torch.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_kernel(
    gate_up_R2I: tl.tensor,
    totals_3: tl.tensor,
    out_RI: tl.tensor,
    scale_Ri: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Walk over tiles of ``ROWS`` rows and 128 columns; with scales, store them quantised."""
    columns_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = num_rows
    if totals_3 is not None:
        end = tl.minimum(tl.load(totals_3 + 2), num_rows)
    for start in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        rows_R = (start + tl.arange(0, ROWS)).to(tl.int64)
        here_R = rows_R < end
        mask_RB = here_R[:, None] & (columns_B < size)[None, :]
        gate = gate_up_R2I + rows_R[:, None] * (2 * size) + columns_B[None, :]
        gate_RB = tl.load(gate, mask=mask_RB, other=0.0).to(tl.float32)
        up_RB = tl.load(gate + size, mask=mask_RB, other=0.0).to(tl.float32)
        out = gate_RB / (1.0 + tl.exp(-gate_RB)) * up_RB
        if scale_Ri is not None:
            out, scale_R = scale_tile(out)
            place_R = scale_Ri + rows_R * tl.num_programs(1) + tl.program_id(1)
            tl.store(place_R, scale_R, mask=here_R)
        place_RB = out_RI + rows_R[:, None] * size + columns_B[None, :]
        tl.store(place_RB, out.to(out_RI.dtype.element_ty), mask=mask_RB)


_swiglu_op = define_op(
    "swiglu(Tensor gate_up_R2I, Tensor? totals_3) -> Tensor",
    kernel=launch,
    twin=swiglu_rows_ref,
    fake=_fake,
)
_quantize_op = define_op(
    "swiglu_quantize(Tensor gate_up_R2I, Tensor? totals_3) -> (Tensor, Tensor)",
    kernel=launch_quantize,
    twin=swiglu_quantize_ref,
    fake=_fake_quantize,
)
