"""What a grouped GEMM must know of its groups, all of it on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_eaas.ops.shrinking import group_shrink


class ActiveGroups(NamedTuple):
    """The groups that have rows, as a short list that a GEMM walks over.

    Make one with ``ActiveGroups.of``; both GEMMs of a layer may use it.

    Example:
        ``counts=[0, 3, 0, 40]`` and tiles of 16 rows have ``active=[1, 3, -1, -1]``,
        ``offsets=[0, 3, 43, 43]``, ``tiles=[0, 1, 4, 4]`` and ``totals=[2, 4, 43]``.
    """

    counts_G: Tensor
    """Rows of each group, ``(G,)`` int32."""

    active_G: Tensor
    """The active groups, ``(G,)`` int32, filled up with -1."""

    offsets_G: Tensor
    """The first packed row of each active group, ``(G,)`` int32."""

    tiles_G: Tensor
    """The first tile of each active group, ``(G,)`` int32."""

    totals_3: Tensor
    """Active groups, tiles and rows, ``(3,)`` int32."""

    block_rows: int
    """Rows of a tile."""

    slots_G: Tensor | None = None
    """Where each group's matrix stands in the slab, ``(G,)`` int32; None: group g's in slot g.
    Change it between two replays of a captured graph when experts come and go. Groups whose slot
    is not in the slab must have no rows: else these become NaN."""

    @classmethod
    def of(cls, counts_G: Tensor, block_rows: int, slots_G: Tensor | None = None) -> ActiveGroups:
        """Shrink the groups, without a host sync.

        Args:
            counts_G: Rows of each group, ``(G,)`` int32.
            block_rows: Rows of a tile, as ``choose_block_rows`` gives them.
            slots_G: Where each group's matrix stands in the slab, ``(G,)`` int32.

        Raises:
            ConfigError: What ``group_shrink`` refuses.
        """
        return cls(counts_G, *group_shrink(counts_G, block_rows), block_rows, slots_G)
