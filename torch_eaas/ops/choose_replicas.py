"""The client chooses, on the GPU, which holder of each expert serves this batch.

At decode sizes a server's time is the number of distinct experts that it must read, not of tokens.
So the experts of a batch are given out one after the other, each to the holder that has the fewest
so far: the choice of a host-driven client, expert by expert. One warp does it, since each choice
waits for the one before; it goes through the experts of the batch, not through all of the layer.

Shape suffixes: see ``pair_table``; E experts of a layer, H holders of an expert at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.errors import ConfigError
from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.reference_client import choose_replicas_ref

MAX_EXPERTS = 1024
_IDS = 1024


def choose_replicas(ids_TK: Tensor, holders_EH: Tensor, num_pairs: int) -> Tensor:
    """Choose one pair for each expert of a layer.

    Args:
        ids_TK: The batch's expert ids, ``(T, K)`` int32, -1 for none.
        holders_EH: The pairs that may serve each expert, ``(E, H)`` int32, filled up with -1. The
            host writes them between replays: without the dead, without suspects where others hold
            it too, and each begins with another one, so that clients spread.
        num_pairs: P.

    Returns:
        The pair of each expert, ``(E,)`` int32, -1 where there is none. For experts that are not in
        the batch it is the first holder.

    Raises:
        ConfigError: Another dtype, shape or layout, or more than ``MAX_EXPERTS`` experts.

    Example:
        Experts 0, 1 and 2 may go to pairs ``[[5, 6], [5, 6], [5, -1]]``. With all in the batch, 0
        goes to 5, 1 to 6 and 2 to 5; without 0, expert 1 goes to 5.
    """
    check_tensor("ids_TK", ids_TK, (torch.int32,), 2)
    check_tensor("holders_EH", holders_EH, (torch.int32,), 2)
    check_at_least("num_pairs", num_pairs, 1)
    if not 1 <= len(holders_EH) <= MAX_EXPERTS or not holders_EH.shape[1]:
        raise ConfigError(
            f"holders_EH must name at least one holder of 1 to {MAX_EXPERTS} experts, got shape "
            f"{tuple(holders_EH.shape)}"
        )
    pairs_E: Tensor = _op(ids_TK, holders_EH, num_pairs)
    return pairs_E


def launch(ids_TK: Tensor, holders_EH: Tensor, num_pairs: int) -> Tensor:
    """Run the kernel: one warp."""
    experts, holders = holders_EH.shape
    pairs_E = _fake(ids_TK, holders_EH, num_pairs)
    present_E, active_E = torch.empty_like(pairs_E), torch.empty_like(pairs_E)
    with on_device(ids_TK):
        _choose_kernel[(1,)](
            ids_TK,
            holders_EH,
            pairs_E,
            present_E,
            active_E,
            ids_TK.numel(),
            experts,
            holders,
            EXPERTS=triton.next_power_of_2(experts),
            HOLDERS=triton.next_power_of_2(holders),
            PAIRS=triton.next_power_of_2(num_pairs),
            IDS=_IDS,
            num_warps=1,
        )
    return pairs_E


def _fake(ids_TK: Tensor, holders_EH: Tensor, num_pairs: int) -> Tensor:
    return holders_EH.new_empty(len(holders_EH))


@triton.jit(do_not_specialize=["num_ids", "num_experts", "num_holders"])
def _choose_kernel(
    ids_TK: tl.tensor,
    holders_EH: tl.tensor,
    pairs_E: tl.tensor,
    present_E: tl.tensor,
    active_E: tl.tensor,
    num_ids: tl.tensor,
    num_experts: tl.tensor,
    num_holders: tl.tensor,
    EXPERTS: tl.constexpr,
    HOLDERS: tl.constexpr,
    PAIRS: tl.constexpr,
    IDS: tl.constexpr,
) -> None:
    """Mark the batch's experts, list them, and give them out in order."""
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    tl.store(present_E + expert, tl.zeros((EXPERTS,), tl.int32), mask=is_expert)
    tl.debug_barrier()
    for start in range(0, num_ids, IDS):
        at = start + tl.arange(0, IDS)
        ids = tl.load(ids_TK + at, mask=at < num_ids, other=-1)
        is_id = (ids >= 0) & (ids < num_experts)
        tl.store(present_E + ids, tl.full((IDS,), 1, tl.int32), mask=is_id)
    tl.debug_barrier()
    present = tl.load(present_E + expert, mask=is_expert, other=0)
    tl.store(active_E + tl.cumsum(present, axis=0) - present, expert, mask=present > 0)
    first = tl.load(holders_EH + expert * num_holders, mask=is_expert, other=-1)
    tl.store(pairs_E + expert, first, mask=is_expert)
    tl.debug_barrier()

    holder = tl.arange(0, HOLDERS)
    pair = tl.arange(0, PAIRS)
    loads = tl.zeros((PAIRS,), tl.int32)
    for i in range(tl.sum(present, axis=0)):
        active = tl.load(active_E + i)
        row = holders_EH + active * num_holders + holder
        holders = tl.load(row, mask=holder < num_holders, other=-1)
        is_its = holders[:, None] == pair[None, :]
        its_loads = tl.sum(tl.where(is_its, loads[None, :], 0), axis=1)
        best = tl.argmin(tl.where(holders >= 0, its_loads, 1 << 30), axis=0)
        chosen = tl.sum(tl.where(holder == best, holders, 0), axis=0)
        loads += (pair == chosen).to(tl.int32)
        tl.store(pairs_E + active, chosen)


_op = define_op(
    "choose_replicas(Tensor ids_TK, Tensor holders_EH, int num_pairs) -> Tensor",
    kernel=launch,
    twin=choose_replicas_ref,
    fake=_fake,
)
