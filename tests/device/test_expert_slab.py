"""A slab's slots and its table: what comes where, when it is free again, what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.served import LAYERS, WEIGHTS, D, E, I
from tests.served_slabs import Key, slab
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.errors import ConfigError
from torch_eaas.experts import ExpertPool, ExpertWeights
from torch_eaas.ops import pack


def run(made: ExpertSlab, key: Key, x_TD: torch.Tensor) -> torch.Tensor:
    """Return what a slab's expert makes of tokens, by its own table."""
    num_tokens = torch.tensor([len(x_TD)], dtype=torch.int32)
    ids_1TK = torch.full((1, len(x_TD), 1), key[1], dtype=torch.int32)
    layers = torch.tensor([key[0]], dtype=torch.int32)
    rows, places, counts = pack(ids_1TK, layers, num_tokens, made.table, made.num_slots)
    assert bool((places >= 0).all())
    return made.run(x_TD, rows, counts, num_tokens, top_k=1, block_rows=16).float()


def expected(weights: ExpertWeights, x_TD: torch.Tensor, storage: Any) -> torch.Tensor:
    pool = ExpertPool(D, I, storage=storage)
    pool.add(0, 0, weights)
    zeros = torch.zeros((len(x_TD), 1), dtype=torch.int64)
    out: torch.Tensor = pool(x_TD, zeros, torch.ones(len(x_TD), 1))
    return out


@pytest.mark.parametrize(("storage", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp8", 1e-1)])
def test_every_slot_runs_the_expert_that_the_table_names(storage: Any, tolerance: float) -> None:
    made = slab(storage=storage)
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(1))
    assert made.holdings == dict.fromkeys(LAYERS, tuple(range(E)))
    for key in ((1, 0), (1, 7), (3, 4)):
        wanted = expected(WEIGHTS[key], x, storage)
        assert (run(made, key, x) - wanted).abs().max() < tolerance * wanted.abs().max()


def test_fp8_weights_of_a_checkpoint_are_kept_bit_by_bit() -> None:
    stored = WEIGHTS[1, 0].quantized()
    assert stored.scales is not None
    made = slab([(1, 0)], slots=1, storage="fp8", weights={(1, 0): stored})
    gate_up, down = made._memory.gate_up, made._memory.down
    # gate and up each begin a block of their own
    assert gate_up.numbers.shape == (1, 256, D)
    for part, matrix in (
        (gate_up.numbers[0, :I], stored.gate_ID),
        (gate_up.numbers[0, 128 : 128 + I], stored.up_ID),
        (down.numbers[0, :, :I], stored.down_DI),
    ):
        assert torch.equal(part.view(torch.uint8), matrix.view(torch.uint8))
    assert torch.equal(gate_up.scales[0], torch.cat([*stored.scales[:2]]))
    assert torch.equal(down.scales[0], stored.scales[2])
    assert not gate_up.numbers[0, I:128].view(torch.uint8).any()


def test_weights_in_other_blocks_are_quantized_anew() -> None:
    blocks = ExpertWeights(*WEIGHTS[1, 0].dequantized(), block=(8, 8)).quantized()
    made = slab([(1, 0)], slots=1, storage="fp8", weights={(1, 0): blocks})
    x = torch.randn(2, D, generator=torch.Generator().manual_seed(1))
    wanted = expected(WEIGHTS[1, 0], x, "fp32")
    assert (run(made, (1, 0), x) - wanted).abs().max() < 0.2 * wanted.abs().max()


def test_replacing_an_expert_takes_a_free_slot_and_gives_one_back() -> None:
    made = slab([(1, 0)], slots=2)
    before = int(made.table[1, 0])
    made.add(1, 0, WEIGHTS[1, 5])
    assert int(made.table[1, 0]) != before
    assert made.num_free == 1
    x = torch.randn(2, D, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(run(made, (1, 0), x), expected(WEIGHTS[1, 5], x, "fp32"))


def test_a_slot_is_free_only_after_no_iteration_reads_it() -> None:
    made = slab([(1, 0), (1, 1)], slots=2)
    seen: list[tuple[int, bool]] = []

    def settle() -> None:
        # the table that the next iteration would be given, and the slots that may be written
        seen.append((made.num_free, bool((made._table.wanted[1, 1] == -1).item())))
        made.push()

    made.attach(settle)
    made.remove(1, 1)
    assert seen == [(0, True)]
    assert made.num_free == 1
    assert int(made.table[1, 1]) == -1
    assert made.holdings == {1: (0,)}


def test_weights_are_in_their_slot_before_the_table_names_it() -> None:
    made = slab([], slots=1)
    gates: list[torch.Tensor] = []

    def settle() -> None:
        gates.append(made._memory.gate_up.numbers[0, :I].clone())
        made.push()

    made.attach(settle)
    made.add(3, 2, WEIGHTS[3, 2])
    assert torch.equal(gates[0], WEIGHTS[3, 2].gate_ID)


def changed(**fields: Any) -> ExpertWeights:
    return dataclasses.replace(WEIGHTS[1, 0], **fields)


@pytest.mark.parametrize(
    ("key", "weights", "message"),
    [
        ((1, 1), WEIGHTS[1, 1], r"1 experts need as many free slots, .* 1 0 are free; raise slots"),
        ((4, 0), WEIGHTS[1, 1], r"layer 4, expert 0: .* layers 0 to 3 and experts 0 to 7; raise"),
        ((1, 8), WEIGHTS[1, 1], r"layer 1, expert 8: .* raise max_layers or max_experts"),
        ((1, 1), changed(up_ID=torch.zeros(I, D + 1)), rf"up must be \({I}, {D}\), got"),
        ((1, 1), changed(up_ID=torch.zeros(I, D).int()), r"up must be of floats, got torch.int32"),
        (
            (1, 1),
            changed(up_ID=torch.zeros(I, D).to(torch.float8_e4m3fn)),
            "block scales belong to float8_e4m3fn weights and to no others, got up of",
        ),
    ],
    ids=["no slot", "layer", "expert", "shape", "dtype", "no scales"],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    key: Key, weights: ExpertWeights, message: str
) -> None:
    made = slab([(1, 0)], slots=1)
    with pytest.raises(ConfigError, match=message):
        made.update({key: weights})
    assert made.holdings == {1: (0,)}


def test_an_expert_that_is_not_held_cannot_be_removed() -> None:
    with pytest.raises(ConfigError, match="layer 1, expert 3 is not held"):
        slab([(1, 0)]).remove(1, 3)


@pytest.mark.parametrize("name", ["slots", "max_layers", "max_experts"])
def test_sizes_are_at_least_one(name: str) -> None:
    sizes = {"slots": 1, "max_layers": 1, "max_experts": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 1, got 0"):
        ExpertSlab(D, I, device="cpu", **sizes)
