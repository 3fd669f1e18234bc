"""The grouped GEMM as it compiles for Hopper and Blackwell: tensor cores, TMA, wide loads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.compiling import CAPABILITIES, find
from torch_eaas.ops import gemm_kernel
from torch_eaas.ops.active_groups import ActiveGroups
from torch_eaas.ops.gemm_config import GemmConfig, default_config


def _launch(
    dtype: torch.dtype,
    block_rows: int,
    *,
    config: GemmConfig | None = None,
    gathers: bool = False,
    may_describe: bool = True,
    num_groups: int = 464,
) -> Tensor:
    counts_G = torch.zeros(num_groups, dtype=torch.int32)
    groups = ActiveGroups.of(counts_G, block_rows, counts_G if gathers else None)
    tiles = config or default_config(block_rows)
    is_fp8 = dtype == torch.float8_e4m3fn
    return gemm_kernel.launch(
        torch.empty(64, 512, dtype=dtype),
        torch.empty(2, 256, 512, dtype=dtype),
        torch.zeros(512, dtype=torch.int32) if gathers else None,
        groups.slots_G,
        *groups[:5],
        8 if gathers else 1,
        block_rows,
        [tiles.block_n, tiles.stages, tiles.warps, tiles.programs, tiles.split_k],
        scales=(torch.empty(64, 4), torch.empty(2, 2, 4)) if is_fp8 else None,
        out_dtype=torch.bfloat16 if is_fp8 else None,
        may_describe=may_describe,
    )


# all kernels are compiled for the first test

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SPLIT = GemmConfig(batch_invariant=False, split_k=4)
LAUNCHES: dict[str, Callable[[], object]] = {
    "bf16 decode": lambda: _launch(BF16, 16, gathers=True),
    "bf16 decode, pointers": lambda: _launch(BF16, 16, may_describe=False),
    "bf16 dense": lambda: _launch(BF16, 128),
    "bf16 split": lambda: _launch(BF16, 16, config=SPLIT, num_groups=65_536),
    "fp8 decode": lambda: _launch(FP8, 16, gathers=True),
    "fp8 dense": lambda: _launch(FP8, 128, gathers=True),
}
MMA = {
    ("bf16", 90): r"wgmma\.mma_async\.sync\.aligned\.m64n{rows}k16\.f32\.bf16\.bf16",
    ("fp8", 90): r"wgmma\.mma_async\.sync\.aligned\.m64n{rows}k32\.f32\.e4m3\.e4m3",
    ("bf16", 100): r"tcgen05\.mma\.cta_group::1\.kind::f16",
    ("fp8", 100): r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4",
}


def rows_of(launch: str) -> int:
    return 128 if "dense" in launch else 16


CAPABILITY = pytest.mark.parametrize("capability", CAPABILITIES)


@CAPABILITY
@pytest.mark.parametrize("launch", LAUNCHES)
def test_it_runs_on_tensor_cores_with_wide_loads_and_stores(launch: str, capability: int) -> None:
    kernel = find(__name__, launch, "grouped_gemm_kernel", capability)
    mma = MMA[launch.split()[0], capability].format(rows=rows_of(launch))
    assert kernel.count(mma) > 0
    assert kernel.count(r"\bmma\.sync") == 0
    # rows come 16 bytes at a time, and matrices by TMA where they may
    assert kernel.count(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10") > 0
    assert kernel.count(r"cp\.async\.ca") == 0
    assert (kernel.count(r"cp\.async\.bulk\.tensor\.2d") > 0) == ("pointers" not in launch)
    assert kernel.count(r"st\.global\.v4\.b32") > 0
    assert kernel.count(r"st\.global\.b16") == 0


@CAPABILITY
@pytest.mark.parametrize("launch", LAUNCHES)
def test_it_spills_nothing_and_fits_beside_its_neighbours(launch: str, capability: int) -> None:
    kernel = find(__name__, launch, "grouped_gemm_kernel", capability)
    assert kernel.local_bytes == 0
    config = default_config(rows_of(launch))
    # what a multiprocessor of an H100 or B200 has: 64 Ki registers, 228 KiB of shared memory
    assert config.programs * config.warps * 32 * kernel.registers <= 65_536
    assert config.programs * (kernel.shared_bytes + 1024) <= 228 * 1024


@CAPABILITY
def test_nothing_in_it_is_atomic(capability: int) -> None:
    for launch in LAUNCHES:
        kernel = find(__name__, launch, "grouped_gemm_kernel", capability)
        assert kernel.count(r"\b(atom|red)\.(global|shared)?") == 0
