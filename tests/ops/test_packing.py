"""pack: the kernels in the interpreter against the twin, and the twin by a loop over rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops.packing import launch, pack
from torch_eaas.ops.reference import pack_ref

pytestmark = pytest.mark.usefixtures("poisoned_empty")

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, int]
Pack = Callable[..., tuple[Tensor, Tensor, Tensor]]


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_inputs(
    num_tokens: list[int], room: int, top_k: int, layers: int, experts: int, *, held: float = 0.7
) -> Inputs:
    """Draw ids, a tenth of them -1, and hold a part of the experts; the rest is garbage."""
    generator = torch.Generator().manual_seed(sum(num_tokens) + room + experts)
    shape = (len(num_tokens), room, top_k)
    ids = torch.randint(0, experts, shape, generator=generator)
    ids[torch.rand(shape, generator=generator) < 0.1] = -1
    for slot, count in enumerate(num_tokens):
        ids[slot, count:] = -77
    is_held = torch.rand((layers, experts), generator=generator) < held
    groups = torch.where(is_held, is_held.flatten().cumsum(0).view(is_held.shape) - 1, -1)
    layer = torch.randint(0, layers, (len(num_tokens),), generator=generator)
    return ids.int(), layer.int(), ints(num_tokens), groups.int(), int(is_held.sum())


def one_group(counts: list[int], room: int) -> Inputs:
    """Send every row to one of two experts, the second of them once."""
    ids = torch.zeros((len(counts), room, 1), dtype=torch.int32)
    ids[0, counts[0] // 2] = 1
    return ids, ints([0] * len(counts)), ints(counts), ints([[0, 1]]), 2


CASES = [
    pytest.param((ints([[[1, 0]], [[0, -1]]]), ints([0, 1]), ints([1, 1]),
                  ints([[0, 1], [2, -1]]), 3), id="the docstring's"),
    pytest.param(random_inputs([0, 0, 0], 4, 2, 2, 8), id="no tokens in any slot"),
    pytest.param(random_inputs([1], 1, 1, 1, 1, held=1), id="one row"),
    pytest.param(random_inputs([0, 63, 0, 1, 0], 63, 8, 3, 16), id="63 tokens and 1, rest empty"),
    pytest.param(random_inputs([64, 65], 65, 2, 2, 33), id="64 and 65 tokens"),
    pytest.param(random_inputs([127, 128, 129, 3], 129, 3, 2, 9), id="127, 128, 129, a full slot"),
    pytest.param(random_inputs([300, 0, 7], 300, 8, 1, 4), id="300 tokens, ten pieces"),
    pytest.param(random_inputs([2] * 40, 2, 2, 5, 100), id="40 slots, two scans of pieces"),
    pytest.param(random_inputs([5, 5], 5, 2, 2, 8, held=0), id="no expert is held"),
    pytest.param(one_group([300, 129, 0, 128], 300), id="one expert has all rows but one"),
]  # fmt: skip


@pytest.mark.parametrize("inputs", CASES)
def test_the_kernels_give_what_the_twin_gives(inputs: Inputs) -> None:
    for got, expected in zip(launch(*inputs), pack_ref(*inputs), strict=True):
        assert got.dtype == expected.dtype == torch.int32
        assert torch.equal(got, expected)


@pytest.mark.parametrize("inputs", CASES)
def test_the_twin_puts_rows_by_group_and_then_by_slot_token_and_k(inputs: Inputs) -> None:
    ids_STK, layers_S, num_tokens_S, groups_LE, num_groups = inputs
    (_, room, top_k), found = ids_STK.shape, []
    for slot, num_tokens in enumerate(num_tokens_S.tolist()):
        for token in range(num_tokens):
            for k, expert in enumerate(ids_STK[slot, token].tolist()):
                group = int(groups_LE[layers_S[slot], expert]) if expert >= 0 else -1
                if group >= 0:
                    found.append((group, (slot * room + token) * top_k + k))
    expected = [row for _, row in sorted(found)]
    rows_R, places_STK, counts_G = pack_ref(*inputs)
    assert rows_R.tolist() == expected + [-1] * (ids_STK.numel() - len(expected))
    places = [-1] * ids_STK.numel()
    for place, row in enumerate(expected):
        places[row] = place
    assert places_STK.shape == ids_STK.shape
    assert places_STK.flatten().tolist() == places
    groups = [group for group, _ in found]
    assert counts_G.tolist() == [groups.count(group) for group in range(num_groups)]


@pytest.mark.parametrize("do", [launch, pack_ref])
@pytest.mark.parametrize("shape", [(0, 4, 2), (3, 0, 2), (3, 4, 0)], ids=str)
def test_no_rows_at_all_make_counts_of_zero(do: Pack, shape: tuple[int, ...]) -> None:
    slots = torch.zeros(shape[0], dtype=torch.int32)
    ids_STK = torch.zeros(shape, dtype=torch.int32)
    rows_R, places_STK, counts_G = do(ids_STK, slots, slots, ints([[0, 1]]), 2)
    assert rows_R.numel() == 0
    assert places_STK.shape == shape
    assert counts_G.tolist() == [0, 0]


@pytest.mark.parametrize("do", [launch, pack_ref])
def test_what_no_table_knows_has_no_place(do: Pack) -> None:
    # an id beyond the experts, layers beyond the table and below 0, and a group that is not there
    ids_STK = ints([[[0, 2, 1]], [[0, 0, 0]], [[0, 0, 0]]])
    rows_R, places_STK, counts_G = do(ids_STK, ints([0, 1, -1]), ints([1, 1, 1]), ints([[0, 5]]), 2)
    assert rows_R.tolist() == [0] + [-1] * 8
    assert places_STK.flatten().tolist() == [0] + [-1] * 8
    assert counts_G.tolist() == [1, 0]


@pytest.mark.parametrize("do", [launch, pack_ref])
def test_a_slot_never_holds_more_tokens_than_it_has_room_for(
    do: Pack,
) -> None:
    ids_STK = ints([[[0], [0]], [[0], [0]]])
    rows_R, _, counts_G = do(ids_STK, ints([0, 0]), ints([9, -3]), ints([[0]]), 1)
    assert rows_R.tolist() == [0, 1, -1, -1]
    assert counts_G.tolist() == [2]


def test_the_example_of_the_docstring_holds() -> None:
    rows_R, places_STK, counts_G = pack(*CASES[0].values[0])
    assert rows_R.tolist() == [1, 0, 2, -1]
    assert places_STK.tolist() == [[[1, 0]], [[2, -1]]]
    assert counts_G.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["layers_S", "num_tokens_S"])
def test_one_number_for_each_slot_is_asked_for(name: str) -> None:
    counts = {"layers_S": 2, "num_tokens_S": 2, name: 3}
    given = {key: ints([0] * count) for key, count in counts.items()}
    with pytest.raises(ConfigError, match=f"{name} must have one number for each of the 2 slots"):
        pack(ints([[[0]], [[0]]]), given["layers_S"], given["num_tokens_S"], ints([[0]]), 1)


def test_ids_of_another_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ids_STK must be int32, got torch.int64; cast it first"):
        pack(torch.zeros((1, 1, 1), dtype=torch.int64), ints([0]), ints([0]), ints([[0]]), 1)


def test_more_rows_than_a_kernel_counts_are_refused() -> None:
    ids_STK = torch.empty((2**16, 2**12, 8), dtype=torch.int32, device="meta")
    slots = torch.empty(2**16, dtype=torch.int32, device="meta")
    message = r"ids_STK must have at most 2\*\*30 rows, got 2147483648; pack fewer slots at once"
    with pytest.raises(ConfigError, match=message):
        pack(ids_STK, slots, slots, torch.empty((1, 1), dtype=torch.int32, device="meta"), 1)
