"""The client shares a batch among its servers on the GPU: each gets the tokens it is needed for.

Shape suffixes: see ``pair_table``; E experts of a layer; T tokens of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.ops.gate import set_abort
from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.reference_client import missing_word, share_tokens_ref
from torch_eaas.ops.write_requests import Shares

_ROWS = 1024
_FIRST_MISSING = tl.constexpr(missing_word(0, 0))


def share_tokens(
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs_E: Tensor,
    abort: Tensor,
    num_pairs: int,
    *,
    layer: int,
) -> tuple[Shares, Tensor]:
    """Give each pair the tokens of its experts, in order, each token once, all in one launch.

    Args:
        ids_TK: Expert ids, ``(T, K)`` int32; -1 and E mean none, so a smaller batch ends with rows
            of -1.
        weights_TK: Final router weights, ``(T, K)`` fp32.
        pairs_E: The pair that runs each expert of the layer, ``(E,)`` int32, -1 where nobody can.
            The host changes it between replays: that is how a captured graph fails over.
        abort: The step's abort word, ``(1,)`` int64; if an expert has no pair, and nothing of the
            step has failed yet, it becomes the ``missing_word`` of layer and expert.
        num_pairs: P.
        layer: The layer that the ids belong to.

    Returns:
        What each pair gets, and where each token lies in each pair's request, ``(P, T)`` int32, -1
        where it is not.

    Raises:
        ConfigError: Another dtype, shape or layout.

    Example:
        Pair 1 runs expert 0, pair 0 the rest: of ``ids=[[0, 2], [2, 1]]`` pair 1 gets token 0 with
        ``[[0, -1]]``, pair 0 both tokens with ``[[-1, 2], [2, 1]]``; ``places=[[0, 1], [0, -1]]``.
    """
    check_tensor("ids_TK", ids_TK, (torch.int32,), 2)
    check_tensor("weights_TK", weights_TK, (torch.float32,), 2)
    check_tensor("pairs_E", pairs_E, (torch.int32,), 1)
    check_at_least("num_pairs", num_pairs, 1)
    *shares, places_PT = _op(ids_TK, weights_TK, pairs_E, abort, num_pairs, layer)
    return Shares(*shares), places_PT


def launch(
    ids_TK: Tensor, weights_TK: Tensor, pairs_E: Tensor, abort: Tensor, num_pairs: int, layer: int
) -> tuple[Tensor, ...]:
    """Run the kernel: one program a pair."""
    outputs = _fake(ids_TK, weights_TK, pairs_E, abort, num_pairs, layer)
    num_tokens, top_k = ids_TK.shape
    columns = triton.next_power_of_2(top_k)
    with on_device(ids_TK):
        _share_kernel[(num_pairs,)](
            ids_TK,
            weights_TK,
            pairs_E,
            abort,
            *outputs,
            num_tokens,
            len(pairs_E),
            layer,
            TOP_K=top_k,
            COLUMNS=columns,
            BLOCK=max(1, _ROWS // columns),
        )
    return outputs


def _fake(
    ids_TK: Tensor, weights_TK: Tensor, pairs_E: Tensor, abort: Tensor, num_pairs: int, layer: int
) -> tuple[Tensor, ...]:
    num_tokens, top_k = ids_TK.shape
    return (
        ids_TK.new_empty(num_pairs),
        ids_TK.new_empty((num_pairs, num_tokens)),
        ids_TK.new_empty((num_pairs, num_tokens, top_k)),
        weights_TK.new_empty((num_pairs, num_tokens, top_k)),
        ids_TK.new_empty((num_pairs, num_tokens)),
    )


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "layer"])
def _share_kernel(
    ids_TK: tl.tensor,
    weights_TK: tl.tensor,
    pairs_E: tl.tensor,
    abort: tl.tensor,
    counts_P: tl.tensor,
    tokens_PT: tl.tensor,
    ids_PTK: tl.tensor,
    weights_PTK: tl.tensor,
    places_PT: tl.tensor,
    num_tokens: tl.tensor,
    num_experts: tl.tensor,
    layer: tl.tensor,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Look at every token for one pair, block by block, and number those that it gets."""
    pair = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, COLUMNS)[None, :]
    given = 0
    for start in range(0, num_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_token = token < num_tokens
        is_row = is_token[:, None] & (k < TOP_K)
        row = token[:, None] * TOP_K + k
        ids = tl.load(ids_TK + row, mask=is_row, other=-1)
        is_expert = (ids >= 0) & (ids < num_experts)
        pairs = tl.load(pairs_E + ids, mask=is_expert, other=-1)
        # an id beyond the experts is nobody's either, but for their number, which means none
        is_missing = (ids >= 0) & (ids != num_experts) & (pairs < 0)
        missing = tl.max(tl.where(is_missing, ids, -1))
        if missing >= 0:
            set_abort(abort, (layer.to(tl.int64) << 32) + missing + _FIRST_MISSING)
        is_mine = is_expert & (pairs == pair)
        gets = tl.max(is_mine.to(tl.int32), axis=1)
        place = given + tl.cumsum(gets, axis=0) - gets
        first = pair * num_tokens
        is_given = gets > 0
        tl.store(places_PT + first + token, tl.where(is_given, place, -1), mask=is_token)
        tl.store(tokens_PT + first + place, token, mask=is_given)
        at = (first + place[:, None]) * TOP_K + k
        weights = tl.load(weights_TK + row, mask=is_row, other=0.0)
        is_copied = is_given[:, None] & (k < TOP_K)
        tl.store(ids_PTK + at, tl.where(is_mine, ids, -1), mask=is_copied)
        tl.store(weights_PTK + at, weights, mask=is_copied)
        given += tl.sum(gets, axis=0)
    tl.store(counts_P + pair, given)


_op = define_op(
    "share_tokens(Tensor ids_TK, Tensor weights_TK, Tensor pairs_E, Tensor(a!) abort, "
    "int num_pairs, int layer) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel=launch,
    twin=share_tokens_ref,
    fake=_fake,
)
