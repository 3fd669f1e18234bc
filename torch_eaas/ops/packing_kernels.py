"""The three Triton kernels of ``pack``: a stable counting sort.

Each slot's rows, token by token and expert by expert, are cut into pieces of 256, and only pieces
that have tokens are walked over:

1. *rank*: within a piece, how many rows of a row's group come before it; and the piece's count of
   each group, written by the group's last row there.
2. *scan*: for each group, running sums of those counts from piece to piece, and over the groups.
3. *place*: a row goes to where its group begins, plus what earlier pieces have of its group, plus
   its rank.

No atomics: the order is that of slots, tokens and k, always. The scratch of counts has a row for
each piece that there could be, and only those of pieces with tokens are touched.

Shape suffixes: as in ``packing``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_eaas.ops.slot_tokens import find_slot, load_counts


@triton.jit
def _load_ends(
    num_tokens_S: tl.tensor,
    slots: tl.tensor,
    room: tl.tensor,
    top_k: tl.tensor,
    SLOTS: tl.constexpr,
    PIECE: tl.constexpr,
) -> tl.tensor:
    """Return the running sum over slots of the pieces that they have."""
    counts = load_counts(num_tokens_S, tl.arange(0, SLOTS), slots, room)
    return tl.cumsum(tl.cdiv(counts * top_k, PIECE), axis=0)


@triton.jit
def _locate(
    piece: tl.tensor,
    ends_S: tl.tensor,
    num_tokens_S: tl.tensor,
    slots: tl.tensor,
    room: tl.tensor,
    top_k: tl.tensor,
    PIECE: tl.constexpr,
) -> tl.tensor:
    """Return a piece's slot, and its first row and the end of the rows, counted in the slot."""
    slot_1, begin_1 = find_slot(tl.full((1,), piece, tl.int32), ends_S)
    slot = tl.max(slot_1, axis=0)
    end = load_counts(num_tokens_S, slot, slots, room) * top_k
    return slot, (piece - tl.max(begin_1, axis=0)) * PIECE, end


@triton.jit
def _load_groups(
    ids_STK: tl.tensor,
    groups_LE: tl.tensor,
    layer: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    end: tl.tensor,
    layers: tl.tensor,
    experts: tl.tensor,
    num_groups: tl.tensor,
) -> tl.tensor:
    """Return the groups of some rows of the slot whose rows begin at ``first``; -1 for none."""
    ids = tl.load(ids_STK + first + rows, mask=rows < end, other=-1)
    known = (ids >= 0) & (ids < experts) & (layer >= 0) & (layer < layers)
    groups = tl.load(groups_LE + layer.to(tl.int64) * experts + ids, mask=known, other=-1)
    return tl.where(groups < num_groups, groups, -1)


@triton.jit(do_not_specialize=["slots", "layers", "num_groups"])
def rank_kernel(
    ids_STK: tl.tensor,
    layers_S: tl.tensor,
    num_tokens_S: tl.tensor,
    groups_LE: tl.tensor,
    rows_R: tl.tensor,
    places_STK: tl.tensor,
    counts_CG: tl.tensor,
    slots: tl.tensor,
    room: tl.tensor,
    top_k: tl.tensor,
    layers: tl.tensor,
    experts: tl.tensor,
    num_groups: tl.tensor,
    stride: tl.tensor,
    SLOTS: tl.constexpr,
    PIECE: tl.constexpr,
    COMPARED: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Write ranks to ``places_STK`` and counts, and -1 wherever no row comes from or goes to.

    Example:
        A piece of groups ``[2, 0, 2, -1]`` has ranks ``[0, 0, 1, -1]`` and counts ``[1, 0, 2]``.
    """
    slot_rows = room * top_k
    num_rows = slots * slot_rows
    for start in range(tl.program_id(0) * PIECE, num_rows, tl.num_programs(0) * PIECE):
        rows = start + tl.arange(0, PIECE)
        inside = rows < num_rows
        tl.store(rows_R + rows, -1, mask=inside)
        end = load_counts(num_tokens_S, rows // slot_rows, slots, room) * top_k
        tl.store(places_STK + rows, -1, mask=inside & (rows % slot_rows >= end))

    ends_S = _load_ends(num_tokens_S, slots, room, top_k, SLOTS, PIECE)
    for piece in range(tl.program_id(0), tl.max(ends_S, axis=0), tl.num_programs(0)):
        slot, begin, end = _locate(piece, ends_S, num_tokens_S, slots, room, top_k, PIECE)
        layer = tl.load(layers_S + slot)
        first = slot * slot_rows
        counts_G = counts_CG + tl.cast(piece, tl.int64) * stride
        for start in range(0, stride, 8 * GROUPS):
            places = start + tl.arange(0, 8 * GROUPS)
            tl.store(counts_G + places, 0, mask=places < stride)
        # the zeros are written before the counts, by whichever threads
        tl.debug_barrier()

        rows = begin + tl.arange(0, PIECE)
        groups = _load_groups(
            ids_STK, groups_LE, layer, first, rows, end, layers, experts, num_groups
        )
        both = tl.zeros((PIECE,), tl.int32)
        for start in range(begin, tl.minimum(begin + PIECE, end), COMPARED):
            others = start + tl.arange(0, COMPARED)
            others_groups = _load_groups(
                ids_STK, groups_LE, layer, first, others, end, layers, experts, num_groups
            )
            # others along axis 0, which lies within a thread; two sums in one: all, and earlier
            is_same = others_groups[:, None] == groups[None, :]
            is_earlier = others[:, None] < rows[None, :]
            both += tl.sum(tl.where(is_same, tl.where(is_earlier, 65537, 1), 0), axis=0)
        same = both % 65536
        rank = both // 65536
        tl.store(places_STK + first + rows, tl.where(groups >= 0, rank, -1), mask=rows < end)
        tl.store(counts_G + groups, same, mask=(groups >= 0) & (rank == same - 1))


@triton.jit(do_not_specialize=["slots", "num_groups"])
def scan_kernel(
    num_tokens_S: tl.tensor,
    counts_CG: tl.tensor,
    counts_G: tl.tensor,
    starts_G: tl.tensor,
    sums_B: tl.tensor,
    slots: tl.tensor,
    room: tl.tensor,
    top_k: tl.tensor,
    num_groups: tl.tensor,
    stride: tl.tensor,
    SLOTS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Turn each piece's counts into what earlier pieces have; add them up, and over a block.

    Example:
        Pieces with ``[1, 0, 2]`` and ``[0, 3, 1]`` become ``[0, 0, 0]`` and ``[1, 0, 2]``; counts
        are ``[1, 3, 3]``, starts within the block ``[0, 1, 4]`` and its sum is 7.
    """
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    ends_S = _load_ends(num_tokens_S, slots, room, top_k, SLOTS, PIECE)
    num_pieces = tl.max(ends_S, axis=0)
    sum_G = tl.zeros((GROUPS,), tl.int32)
    for start in range(0, num_pieces, PIECES):
        pieces = start + tl.arange(0, PIECES)
        pointers = counts_CG + pieces[:, None].to(tl.int64) * stride + groups[None, :]
        mask = (pieces < num_pieces)[:, None]
        counts = tl.load(pointers, mask=mask, other=0)
        tl.store(pointers, sum_G[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        sum_G += tl.sum(counts, axis=0)
    tl.store(counts_G + groups, sum_G, mask=groups < num_groups)
    tl.store(starts_G + groups, tl.cumsum(sum_G, axis=0) - sum_G, mask=groups < num_groups)
    tl.store(sums_B + tl.program_id(0), tl.sum(sum_G, axis=0))


@triton.jit(do_not_specialize=["slots", "layers", "num_groups", "blocks"])
def place_kernel(
    ids_STK: tl.tensor,
    layers_S: tl.tensor,
    num_tokens_S: tl.tensor,
    groups_LE: tl.tensor,
    rows_R: tl.tensor,
    places_STK: tl.tensor,
    counts_CG: tl.tensor,
    starts_G: tl.tensor,
    sums_B: tl.tensor,
    slots: tl.tensor,
    room: tl.tensor,
    top_k: tl.tensor,
    layers: tl.tensor,
    experts: tl.tensor,
    num_groups: tl.tensor,
    stride: tl.tensor,
    blocks: tl.tensor,
    SLOTS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Turn ranks into places, and write each row's number to its place."""
    ends_S = _load_ends(num_tokens_S, slots, room, top_k, SLOTS, PIECE)
    block = tl.arange(0, BLOCKS)
    begins_B = tl.load(sums_B + block, mask=block < blocks, other=0)
    begins_B = tl.cumsum(begins_B, axis=0) - begins_B
    for piece in range(tl.program_id(0), tl.max(ends_S, axis=0), tl.num_programs(0)):
        slot, begin, end = _locate(piece, ends_S, num_tokens_S, slots, room, top_k, PIECE)
        first = slot * room * top_k
        rows = begin + tl.arange(0, PIECE)
        groups = _load_groups(
            ids_STK,
            groups_LE,
            tl.load(layers_S + slot),
            first,
            rows,
            end,
            layers,
            experts,
            num_groups,
        )
        held = groups >= 0
        places = tl.gather(begins_B, tl.where(held, groups // GROUPS, 0), axis=0)
        places += tl.load(starts_G + groups, mask=held, other=0)
        counts_G = counts_CG + tl.cast(piece, tl.int64) * stride
        places += tl.load(counts_G + groups, mask=held, other=0)
        places += tl.load(places_STK + first + rows, mask=held, other=0)
        tl.store(places_STK + first + rows, places, mask=held)
        tl.store(rows_R + places, first + rows, mask=held)
