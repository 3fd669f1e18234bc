"""Pack: the rows of all slots of all clients, sorted by (layer, expert), without a host sync.

How it is done stands in ``packing_kernels``.

Shape suffixes: S slots, T tokens that a slot has room for, K experts per token, R = S * T * K rows,
L layers, E experts of a layer, G groups, C pieces of rows, B blocks of groups.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.errors import ConfigError
from torch_eaas.ops.launching import blocks_on, check_tensor, define_op, on_device
from torch_eaas.ops.packing_kernels import place_kernel, rank_kernel, scan_kernel
from torch_eaas.ops.reference import pack_ref

_PIECE = 256
_COMPARED = 16
_GROUPS = 128
_PIECES = 16


def pack(
    ids_STK: Tensor, layers_S: Tensor, num_tokens_S: Tensor, groups_LE: Tensor, num_groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the rows of all slots by group, stably.

    A row is one expert of one token; its number is ``(slot * T + token) * K + k``.

    Args:
        ids_STK: Expert ids, ``(S, T, K)`` int32. Those below 0, or beyond E, name no expert; those
            of tokens that a slot does not hold are not looked at.
        layers_S: Each slot's layer, ``(S,)`` int32; a layer outside of L has no experts here.
        num_tokens_S: Tokens that each slot holds, ``(S,)`` int32, 0 to T.
        groups_LE: The group of each expert of each layer, ``(L, E)`` int32, -1 where it is not
            held.
        num_groups: G.

    Returns:
        All int32. The rows in packed order, ``(R,)``, filled up with -1; the place of each row
        there, ``(S, T, K)``, -1 for none; and the rows of each group, ``(G,)``.

    Raises:
        ConfigError: Another dtype, shape or layout, or more than 2**30 rows.

    Example:
        Two slots of one token each, ``ids=[[[1, 0]], [[0, -1]]]``, of layers ``[0, 1]`` with
        ``groups=[[0, 1], [2, -1]]`` give ``rows=[1, 0, 2, -1]``, ``places=[[[1, 0]], [[2, -1]]]``
        and ``counts=[1, 1, 1]``.
    """
    _check(ids_STK, layers_S, num_tokens_S, groups_LE)
    check_at_least("num_groups", num_groups, 0)
    rows_R, places_STK, counts_G = _op(ids_STK, layers_S, num_tokens_S, groups_LE, num_groups)
    return rows_R, places_STK, counts_G


def _check(ids_STK: Tensor, layers_S: Tensor, num_tokens_S: Tensor, groups_LE: Tensor) -> None:
    for name, tensor, ndim in (
        ("ids_STK", ids_STK, 3),
        ("layers_S", layers_S, 1),
        ("num_tokens_S", num_tokens_S, 1),
        ("groups_LE", groups_LE, 2),
    ):
        check_tensor(name, tensor, (torch.int32,), ndim)
    for name, tensor in (("layers_S", layers_S), ("num_tokens_S", num_tokens_S)):
        if tensor.shape[0] != ids_STK.shape[0]:
            raise ConfigError(
                f"{name} must have one number for each of the {ids_STK.shape[0]} slots of "
                f"ids_STK, got {tensor.shape[0]}"
            )
    if ids_STK.numel() > 2**30:
        raise ConfigError(
            f"ids_STK must have at most 2**30 rows, got {ids_STK.numel()}; pack fewer slots at once"
        )


def launch(
    ids_STK: Tensor, layers_S: Tensor, num_tokens_S: Tensor, groups_LE: Tensor, num_groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernels."""
    inputs = (ids_STK, layers_S, num_tokens_S, groups_LE)
    rows_R, places_STK, counts_G = _fake(*inputs, num_groups)
    slots, room, top_k = ids_STK.shape
    if ids_STK.numel() == 0:
        return rows_R, places_STK, counts_G.zero_()
    max_pieces = slots * triton.cdiv(room * top_k, _PIECE)
    blocks = triton.cdiv(num_groups, _GROUPS)
    stride = blocks * _GROUPS
    counts_CG = ids_STK.new_empty((max_pieces, stride))
    starts_G, sums_B = torch.empty_like(counts_G), counts_G.new_empty(blocks)
    walkers = min(max_pieces, blocks_on(ids_STK.device, 4))
    shape = (slots, room, top_k)
    sizes = (*shape, *groups_LE.shape, num_groups, stride)
    power = triton.next_power_of_2
    common = {"SLOTS": power(slots), "PIECE": _PIECE, "GROUPS": _GROUPS}
    outputs = (rows_R, places_STK, counts_CG)
    with on_device(ids_STK):
        rank_kernel[(walkers,)](*inputs, *outputs, *sizes, COMPARED=_COMPARED, **common)
        if num_groups:
            scratch = (counts_CG, counts_G, starts_G, sums_B)
            scan_kernel[(blocks,)](
                num_tokens_S, *scratch, *shape, num_groups, stride, PIECES=_PIECES, **common
            )
            place_kernel[(walkers,)](
                *inputs, *outputs, starts_G, sums_B, *sizes, blocks, BLOCKS=power(blocks), **common
            )
    return rows_R, places_STK, counts_G


def _fake(
    ids_STK: Tensor, layers_S: Tensor, num_tokens_S: Tensor, groups_LE: Tensor, num_groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows_R = ids_STK.new_empty(ids_STK.numel())
    return rows_R, torch.empty_like(ids_STK), ids_STK.new_empty(num_groups)


_op = define_op(
    "pack(Tensor ids_STK, Tensor layers_S, Tensor num_tokens_S, Tensor groups_LE, int num_groups)"
    " -> (Tensor, Tensor, Tensor)",
    kernel=launch,
    twin=pack_ref,
    fake=_fake,
)
