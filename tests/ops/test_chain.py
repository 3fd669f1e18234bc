"""The ops one after another: what the experts give each token, by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_eaas.ops import activation, combining, gemm_kernel, packing, reference, shrinking

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SLOTS, ROOM, TOP_K, LAYERS, EXPERTS, HIDDEN, SIZE = 4, 5, 3, 2, 6, 9, 7


def gemm_kernel_of(
    x: Tensor, weights: Tensor, lists: tuple[Tensor, ...], rows: Tensor | None, gather_div: int
) -> Tensor:
    return gemm_kernel.launch(x, weights, rows, None, *lists, gather_div, 16, [64, 4, 4, 2, 1])


def gemm_twin_of(
    x: Tensor, weights: Tensor, lists: tuple[Tensor, ...], rows: Tensor | None, gather_div: int
) -> Tensor:
    return reference.grouped_gemm_ref(x, weights, lists[0], rows_R=rows, gather_div=gather_div)


KERNELS = SimpleNamespace(
    gemm=gemm_kernel_of,
    pack=packing.launch,
    shrink=shrinking.launch,
    swiglu=activation.launch,
    combine=combining.launch,
)
TWINS = SimpleNamespace(
    gemm=gemm_twin_of,
    pack=reference.pack_ref,
    shrink=reference.group_shrink_ref,
    swiglu=reference.swiglu_rows_ref,
    combine=reference.combine_rows_ref,
)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("per_expert", [True, False], ids=["rows", "sums"])
@pytest.mark.parametrize("ops", [KERNELS, TWINS], ids=["kernels", "twins"])
def test_each_token_gets_what_its_experts_of_its_layer_make_of_it(
    ops: Any, per_expert: bool
) -> None:
    ids = torch.randint(
        -1, EXPERTS, (SLOTS, ROOM, TOP_K), generator=torch.Generator().manual_seed(3)
    )
    layers, num_tokens = torch.tensor([1, 0, 0, 1]), torch.tensor([5, 0, 2, 1])
    # expert 0 of layer 0 and expert 5 of layer 1 are held elsewhere
    groups = torch.arange(-1, LAYERS * EXPERTS - 1).view(LAYERS, EXPERTS)
    groups[1, 5] = -1
    x, weights = random(SLOTS, ROOM, HIDDEN, seed=0), random(SLOTS, ROOM, TOP_K, seed=1)
    gate_up = random(LAYERS * EXPERTS, 2 * SIZE, HIDDEN, seed=2)
    down = random(LAYERS * EXPERTS, HIDDEN, SIZE, seed=4)
    num_groups = LAYERS * EXPERTS - 2

    rows, places, counts = ops.pack(
        *(t.int() for t in (ids, layers, num_tokens, groups)), num_groups
    )
    lists = (counts, *ops.shrink(counts, 16))
    hidden = ops.swiglu(
        ops.gemm(x.view(-1, HIDDEN), gate_up[:num_groups], lists, rows, TOP_K), lists[-1]
    )
    out = ops.combine(
        ops.gemm(hidden, down[:num_groups], lists, None, 1),
        places.view(-1, TOP_K),
        weights.view(-1, TOP_K),
        per_expert,
        num_tokens.int(),
    ).view(SLOTS, ROOM, -1, HIDDEN)

    for slot, count in enumerate(num_tokens.tolist()):
        for token in range(count):
            expected = expert_rows(
                x[slot, token], ids[slot, token], weights[slot, token],
                lambda e, slot=slot: int(groups[layers[slot], e]), gate_up, down,
            )  # fmt: skip
            wanted = expected if per_expert else expected.sum(0, keepdim=True)
            torch.testing.assert_close(out[slot, token].double(), wanted, rtol=1e-4, atol=1e-4)
        assert bool(out[slot, count:].isnan().all())


def expert_rows(
    x_D: Tensor,
    ids_K: Tensor,
    weights_K: Tensor,
    group_of: Callable[[int], int],
    gate_up: Tensor,
    down: Tensor,
) -> Tensor:
    """Return one token's weighted row of each of its experts; zeros for those not held."""
    out = torch.zeros((TOP_K, HIDDEN), dtype=torch.float64)
    for k, expert in enumerate(ids_K.tolist()):
        group = group_of(expert) if expert >= 0 else -1
        if group >= 0:
            gate, up = (gate_up[group].double() @ x_D.double()).chunk(2)
            row = down[group].double() @ (gate * torch.sigmoid(gate) * up)
            out[k] = float(weights_K[k]) * row
    return out
