"""How a grouped GEMM is cut into tiles: chosen by what the host knows, never by a count."""

from __future__ import annotations

from dataclasses import dataclass

from torch_eaas.config import check_at_least
from torch_eaas.errors import ConfigError

ROW_TILES = (16, 32, 64, 128, 256)
"""Rows that a tile may have."""

INPUT_BYTES = 128
"""Bytes of a row that one step multiplies: 128 inputs in FP8 (one scale's block), 64 in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """The tiles of a grouped GEMM, but for their rows, which ``ActiveGroups`` says.

    Nothing here changes a result's bits, except ``split_k``.

    Example:
        ``GemmConfig(batch_invariant=False, split_k=4)`` lets four programs share each sum.
    """

    block_n: int = 128
    """Outputs of a tile, 64 or 128."""

    stages: int = 4
    """Steps of the sum that are being loaded at once."""

    warps: int = 4
    """Warps of a program, 4 or 8."""

    programs: int = 2
    """Programs for each multiprocessor."""

    batch_invariant: bool = True
    """A row's bits depend on that row, its matrix and the GPU alone, so ``split_k`` must be 1."""

    split_k: int = 1
    """Parts that each sum over K is cut into, for GEMMs with fewer tiles than the GPU has room for;
    they are written as fp32 and then added up."""

    def __post_init__(self) -> None:
        _check_one_of("block_n", self.block_n, (64, 128))
        _check_one_of("warps", self.warps, (4, 8))
        for name in ("stages", "programs", "split_k"):
            check_at_least(name, getattr(self, name), 1)
        if self.batch_invariant and self.split_k > 1:
            raise ConfigError(
                f"split_k is {self.split_k}, but a batch-invariant sum has one part; "
                "pass batch_invariant=False with it"
            )


def choose_block_rows(max_rows: int, num_groups: int) -> int:
    """Return the rows of a tile for at most ``max_rows`` rows in ``num_groups`` groups.

    Choose once, for the largest batch, and not for each: small batches want small tiles, of which
    less is empty, large ones want few. Servers whose rows are to agree bit by bit choose the same.

    Returns:
        16, 32, 64 or 128: the power of two from the mean group's rows on.

    Example:
        256 rows in 464 groups give 16, 65,536 rows in 512 groups give 128.
    """
    check_at_least("max_rows", max_rows, 0)
    check_at_least("num_groups", num_groups, 0)
    mean = max_rows / max(num_groups, 1)
    return next((rows for rows in ROW_TILES[:3] if rows >= mean), 128)


def default_config(block_rows: int) -> GemmConfig:
    """Return a configuration that needs no measurement.

    Raises:
        ConfigError: ``block_rows`` is not 16, 32, 64, 128 or 256.
    """
    check_block_rows(block_rows)
    if block_rows <= 32:
        return GemmConfig()
    # one program: its accumulator fills the registers, its stages the shared memory
    return GemmConfig(warps=8, stages={64: 6, 128: 4, 256: 3}[block_rows], programs=1)


def candidates(block_rows: int, *, batch_invariant: bool = True) -> tuple[GemmConfig, ...]:
    """Return what a tuner should measure; the default is among them.

    Raises:
        ConfigError: ``block_rows`` is not 16, 32, 64, 128 or 256.
    """
    check_block_rows(block_rows)
    # block_n, warps, programs
    shapes = [(128, 4, 2), (128, 4, 3), (64, 4, 3), (64, 4, 4)]
    if block_rows > 32:
        shapes = [(128, 8, 1), (64, 8, 1), (64, 4, 2)]
    found = [
        GemmConfig(
            block_n=block_n,
            stages=stages,
            warps=warps,
            programs=programs,
            batch_invariant=batch_invariant,
        )
        for block_n, warps, programs in shapes
        for stages in (3, 4, 6)
    ]
    if not batch_invariant and block_rows <= 32:
        found += [GemmConfig(batch_invariant=False, split_k=split_k) for split_k in (2, 4, 8)]
    return tuple(found)


def check_block_rows(block_rows: int) -> None:
    """Raise ConfigError unless a tile of the GEMM may have so many rows."""
    _check_one_of("block_rows", block_rows, ROW_TILES)


def _check_one_of(name: str, value: int, allowed: tuple[int, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
