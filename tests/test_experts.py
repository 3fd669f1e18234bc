"""An expert pool against loops over tokens and experts in float64."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torch_eaas.config import Storage
from torch_eaas.errors import ConfigError
from torch_eaas.experts import ExpertPool, ExpertWeights, GroupTable

pytestmark = pytest.mark.usefixtures("poisoned_empty")

D, I, E, K = 24, 20, 5, 3
LAYER = 2
# as the experts' weights are rounded to the storage before the oracle sees them
TOLERANCE = {
    "fp32": {"rtol": 1e-5, "atol": 1e-5},
    "bf16": {"rtol": 2e-2, "atol": 2e-2},
    "fp8": {"rtol": 1e-5, "atol": 1e-5},
}
BLOCK = (16, 16)
STORAGES = pytest.mark.parametrize("storage", get_args(Storage))
Matrices = tuple[Tensor, Tensor, Tensor]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrices(expert: int, hidden: int = D, inner: int = I) -> Matrices:
    """Return gate, up and down of one expert."""
    seed = 100 * expert
    gate, up = (random(inner, hidden, seed=seed + i) * hidden**-0.5 for i in (1, 2))
    return gate, up, random(hidden, inner, seed=seed + 3) * inner**-0.5


def blocks(shape: tuple[int, int]) -> Iterator[tuple[int, int, tuple[slice, slice]]]:
    rows, columns = (range(0, n, b) for n, b in zip(shape, BLOCK, strict=True))
    for (i, row), (j, column) in product(enumerate(rows), enumerate(columns)):
        yield i, j, (slice(row, row + BLOCK[0]), slice(column, column + BLOCK[1]))


def to_fp8(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix in FP8, its scales, and what both mean, block by block."""
    scale = torch.zeros([-(-n // b) for n, b in zip(matrix.shape, BLOCK, strict=True)])
    stored = torch.zeros(matrix.shape).to(torch.float8_e4m3fn)
    meant = torch.zeros(matrix.shape)
    for i, j, part in blocks(tuple(matrix.shape)):
        scale[i, j] = matrix[part].abs().max() / 448
        stored[part] = (matrix[part] / scale[i, j]).to(torch.float8_e4m3fn)
        meant[part] = stored[part].float() * scale[i, j]
    return stored, scale, meant


def planned(expert: int, storage: str) -> tuple[ExpertWeights, Matrices]:
    """Return an expert as a pool takes it, and the matrices that it stands for."""
    plain = matrices(expert)
    if storage == "fp32":
        return ExpertWeights(*plain), plain
    if storage == "bf16":
        gate, up, down = (matrix.bfloat16() for matrix in plain)
        return ExpertWeights(gate, up, down), (gate, up, down)
    made = [to_fp8(matrix) for matrix in plain]
    stored, scales, meant = zip(*made, strict=True)
    return ExpertWeights(*stored, scales, BLOCK), meant


def pool_of(storage: Storage, experts: range = range(E)) -> tuple[ExpertPool, list[Matrices]]:
    pool = ExpertPool(D, I, storage=storage)
    made = [planned(expert, storage) for expert in experts]
    pool.update({(LAYER, e): weights for e, (weights, _) in zip(experts, made, strict=True)})
    return pool, [meant for _, meant in made]


def oracle(experts: list[Matrices], x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return each token's weighted row of each expert, ``(T, K, D)``, one by one in float64."""
    num_tokens, top_k = ids_TK.shape
    out = torch.zeros(num_tokens, top_k, x_TD.shape[1], dtype=torch.float64)
    for token in range(num_tokens):
        x = x_TD[token].double()
        for k in range(top_k):
            expert = int(ids_TK[token, k])
            if expert < 0:
                continue
            gate, up, down = (matrix.double() for matrix in experts[expert])
            g = gate @ x
            hidden = g / (1 + torch.exp(-g)) * (up @ x)
            out[token, k] = float(weights_TK[token, k]) * (down @ hidden)
    return out


def batch(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_tokens, D, generator=made),
        torch.randint(-1, E, (num_tokens, K), generator=made),
        torch.rand(num_tokens, K, generator=made),
    )


def run(pool: ExpertPool, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Tensor:
    groups, unknown = look_up(pool.table, LAYER, ids)
    assert unknown == []
    out: Tensor = pool(x, groups, weights, **options)
    return out


def look_up(table: GroupTable, layer: int, ids: Tensor) -> tuple[Tensor, list[int]]:
    groups, unknown = table.groups(layer, ids.numpy().astype(np.int32))
    return torch.from_numpy(groups), unknown


# -- the arithmetic ----------------------------------------------------------------------------

x63, ids63, weights63 = batch(63)
skewed = torch.where(torch.arange(63 * K).view(63, K) % 7 == 0, ids63, 1)
CASES = pytest.mark.parametrize(
    ("x", "ids", "weights"),
    [
        pytest.param(*batch(0), id="no tokens"),
        pytest.param(*batch(1), id="one token"),
        pytest.param(x63, ids63, weights63, id="63 tokens"),
        pytest.param(x63, skewed, weights63, id="nearly all of one expert"),
        pytest.param(x63[:7], torch.full((7, K), 4), weights63[:7], id="the same id repeated"),
        pytest.param(x63[:7], ids63[:7].clamp(max=2), weights63[:7], id="nobody picks two experts"),
        pytest.param(x63[:7], torch.full((7, K), -1), weights63[:7], id="no expert at all"),
        pytest.param(x63[:, :1], ids63[:, :1], weights63[:, :1], id="top 1"),
        pytest.param(
            x63.t().contiguous().t()[::2],
            ids63.t().contiguous().t()[::2],
            weights63.t().contiguous().t()[::2],
            id="not contiguous",
        ),
    ],
)


@CASES
@STORAGES
@pytest.mark.parametrize("per_expert", [False, True], ids=["partial", "exact"])
def test_a_pool_gives_what_loops_over_tokens_and_experts_give(
    x: Tensor, ids: Tensor, weights: Tensor, storage: Storage, per_expert: bool
) -> None:
    if x.shape[1] != D:
        x = x63
    pool, experts = pool_of(storage)
    out = run(pool, x, ids, weights, per_expert=per_expert)
    rows_TKD = oracle(experts, x, ids, weights)
    expected = rows_TKD if per_expert else rows_TKD.sum(1)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[storage])
    if per_expert:
        assert not out[ids < 0].any()


@STORAGES
@pytest.mark.parametrize("per_expert", [False, True], ids=["partial", "exact"])
def test_a_batch_that_is_run_in_pieces_gives_the_same(storage: Storage, per_expert: bool) -> None:
    # wide enough for bf16 weights to be packed
    hidden, inner = 512, 384
    pool = ExpertPool(hidden, inner, storage=storage)
    given = [ExpertWeights(*(m.bfloat16() for m in matrices(e, hidden, inner))) for e in range(E)]
    if storage == "fp8":
        given = [expert.quantized() for expert in given]
    pool.update({(LAYER, e): given[e] for e in range(E)})
    # 341 rows are one piece
    made = torch.Generator().manual_seed(3)
    x = torch.randn(150, hidden, generator=made).bfloat16()
    ids = torch.randint(-1, E, (150, K), generator=made)
    assert (ids >= 0).sum() > 341
    weights = torch.rand(150, K, generator=made)
    out = run(pool, x, ids, weights, per_expert=per_expert)[::15]
    rows_TKD = oracle([e.dequantized() for e in given], x[::15], ids[::15], weights[::15])
    expected = rows_TKD if per_expert else rows_TKD.sum(1)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[storage])


@STORAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hidden_states_of_any_wire_dtype_are_understood(
    storage: Storage, dtype: torch.dtype
) -> None:
    pool, experts = pool_of(storage)
    x, ids, weights = batch(9)
    out = run(pool, x.to(dtype), ids, weights)
    expected = oracle(experts, x.to(dtype), ids, weights).sum(1)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[storage])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_any_dtype_can_be_stored_as_any_other(dtype: torch.dtype) -> None:
    x, ids, weights = batch(9)
    given = [tuple(m.to(dtype) for m in matrices(expert)) for expert in range(E)]
    # FP8 keeps 3 bits behind the first
    for storage, bits in (("fp32", 24), ("bf16", 8), ("fp8", 4)):
        pool = ExpertPool(D, I, storage=storage)
        pool.update({(LAYER, e): ExpertWeights(*given[e]) for e in range(E)})
        error = run(pool, x, ids, weights) - oracle(given, x, ids, weights).sum(1)
        assert error.abs().max() < 4 * 2.0**-bits + 1e-5


def test_fp8_weights_can_be_kept_in_full() -> None:
    weights, meant = planned(0, "fp8")
    pool = ExpertPool(D, I, storage="fp32")
    pool.add(LAYER, 0, weights)
    x, _, w = batch(9)
    ids = torch.zeros(9, K, dtype=torch.int64)
    torch.testing.assert_close(
        run(pool, x, ids, w).double(), oracle([meant], x, ids, w).sum(1), rtol=1e-5, atol=1e-5
    )


@STORAGES
def test_nan_and_infinity_in_one_token_stay_in_that_token(storage: Storage) -> None:
    pool, _ = pool_of(storage)
    x, ids, weights = batch(9)
    ids = ids.abs() % E
    clean = run(pool, x, ids, weights, per_expert=True)
    x[2, 5], x[6, 0] = float("nan"), float("inf")
    out = run(pool, x, ids, weights, per_expert=True)
    assert not out[2].isfinite().any()
    assert not out[6].isfinite().all()
    others = [token for token in range(9) if token not in (2, 6)]
    assert torch.equal(out[others], clean[others])


def test_a_weight_beside_no_expert_is_not_looked_at() -> None:
    pool, experts = pool_of("fp32")
    x, ids, weights = batch(9)
    poisoned = weights.masked_fill(ids < 0, float("nan"))
    assert poisoned.isnan().any()
    out = run(pool, x, ids, poisoned)
    expected = oracle(experts, x, ids, weights).sum(1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


# -- determinism -------------------------------------------------------------------------------


@STORAGES
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("hidden", "inner"), [(24, 20), (136, 72)])
def test_in_exact_mode_a_tokens_bits_do_not_depend_on_its_companions(
    storage: Storage, hidden: int, inner: int
) -> None:
    pool = ExpertPool(hidden, inner, storage=storage)
    pool.update({(LAYER, e): ExpertWeights(*matrices(e, hidden, inner)) for e in range(3)})
    made = torch.Generator().manual_seed(7)
    x = torch.randn(70, hidden, generator=made)
    ids = torch.randint(0, 3, (70, 2), generator=made)
    ids[:, 0] = 0
    weights = torch.rand(70, 2, generator=made)
    alone = torch.cat(
        [
            run(pool, x[t : t + 1], ids[t : t + 1], weights[t : t + 1], per_expert=True)
            for t in range(70)
        ]
    )
    # two threads cut the rows into other parts, which shows at few rows
    for num_threads, count in [(1, n) for n in range(1, 71)] + [(2, n) for n in range(1, 24)]:
        torch.set_num_threads(num_threads)
        some = torch.randperm(70, generator=made)[:count]
        together = run(pool, x[some], ids[some], weights[some], per_expert=True)
        assert torch.equal(together, alone[some]), f"{count} tokens, {num_threads} threads"


@STORAGES
def test_in_exact_mode_a_rows_bits_do_not_depend_on_what_else_the_server_holds(
    storage: Storage,
) -> None:
    everything, _ = pool_of(storage)
    x, ids, weights = batch(33)
    whole = run(everything, x, ids, weights, per_expert=True)
    for expert in range(E):
        single = ExpertPool(D, I, storage=storage)
        single.add(LAYER, expert, planned(expert, storage)[0])
        mine = torch.where(ids == expert, ids, -1)
        out = run(single, x, mine, weights, per_expert=True)
        assert torch.equal(out[ids == expert], whole[ids == expert])


# -- which experts there are -------------------------------------------------------------------


def test_ids_are_looked_up_by_layer_and_what_is_not_held_is_named() -> None:
    pool = ExpertPool(D, I)
    weights = ExpertWeights(*matrices(0))
    pool.update({(1, 3): weights, (1, 0): weights, (4, 7): weights})
    assert pool.holdings == {1: (0, 3), 4: (7,)}
    ids = torch.tensor([[0, 3, -1], [3, 3, 0]])
    groups, unknown = look_up(pool.table, 1, ids)
    # groups count (layer, expert) pairs in order
    assert (groups.tolist(), unknown) == ([[0, 1, -1], [1, 1, 0]], [])
    groups, unknown = look_up(pool.table, 4, torch.tensor([[7, 6, -1]]))
    assert (groups.tolist(), unknown) == ([[2, -1, -1]], [6])
    groups, unknown = look_up(pool.table, 1, torch.tensor([[2, 0, 9], [2**31 - 1, 1, 0]]))
    assert (groups.tolist(), unknown) == ([[-1, 0, -1], [-1, -1, 0]], [1, 2, 9, 2**31 - 1])
    groups, unknown = look_up(pool.table, 2, torch.tensor([[5, -1, 5], [0, 0, 1]]))
    assert (groups.unique().tolist(), unknown) == ([-1], [0, 1, 5])


def test_a_pool_of_no_experts_answers_no_expert_with_zeros() -> None:
    pool = ExpertPool(D, I)
    assert pool.holdings == {}
    x, ids, weights = batch(5)
    none = torch.full_like(ids, -1)
    assert run(pool, x, none, weights).tolist() == [[0.0] * D] * 5


def test_experts_can_be_added_replaced_and_removed() -> None:
    pool, experts = pool_of("fp32")
    x, ids, weights = batch(9)
    pool.remove(LAYER, 4)
    assert pool.holdings == {LAYER: (0, 1, 2, 3)}
    assert look_up(pool.table, LAYER, torch.tensor([[4]]))[1] == [4]
    replacement = matrices(17)
    pool.add(LAYER, 2, ExpertWeights(*replacement))
    pool.add(LAYER, 4, ExpertWeights(*experts[4]))
    assert pool.holdings == {LAYER: (0, 1, 2, 3, 4)}
    experts[2] = replacement
    out = run(pool, x, ids, weights)
    torch.testing.assert_close(
        out.double(), oracle(experts, x, ids, weights).sum(1), rtol=1e-5, atol=1e-5
    )


def test_a_batch_under_way_keeps_the_experts_that_it_began_with() -> None:
    pool, experts = pool_of("fp32")
    x, ids, weights = batch(9)
    table = pool.table
    groups, _ = look_up(table, LAYER, ids)
    for expert in range(E):
        pool.remove(LAYER, expert)
    pool.add(1, 0, ExpertWeights(*matrices(17)))
    out = pool.run(table, x, groups, weights, per_expert=False)
    torch.testing.assert_close(
        out.double(), oracle(experts, x, ids, weights).sum(1), rtol=1e-5, atol=1e-5
    )


def test_experts_come_and_go_while_another_thread_runs_them() -> None:
    pool, experts = pool_of("fp32")
    x, _, weights = batch(6)
    ids = torch.zeros(6, K, dtype=torch.int64)
    ids[:, 1] = 4
    full = oracle(experts, x, ids, weights).sum(1)
    done = threading.Event()
    wrong: list[Any] = []
    num_runs = 0

    def run_on() -> None:
        nonlocal num_runs
        while not done.is_set():
            table: GroupTable = pool.table
            groups, unknown = look_up(table, LAYER, ids)
            out = pool.run(table, x, groups, weights, per_expert=False)
            held = torch.where(groups < 0, -1, ids)
            expected = full if not unknown else oracle(experts, x, held, weights).sum(1)
            if unknown not in ([], [4]) or not torch.allclose(out.double(), expected, atol=1e-5):
                wrong.append((unknown, out))
            num_runs += 1

    thread = threading.Thread(target=run_on)
    thread.start()
    while num_runs < 30:
        pool.remove(LAYER, 4)
        pool.add(LAYER, 4, ExpertWeights(*experts[4]))
    done.set()
    thread.join()
    assert not wrong


def test_parameters_are_taken_as_plain_weights() -> None:
    pool = ExpertPool(D, I)
    gate, up, down = (nn.Parameter(matrix) for matrix in matrices(0))
    pool.add(LAYER, 0, ExpertWeights(gate, up, down))
    x, _, weights = batch(5)
    ids = torch.zeros(5, K, dtype=torch.int64)
    out = run(pool, x, ids, weights.requires_grad_())
    assert not out.requires_grad
    weights = weights.detach()
    expected = oracle([matrices(0)], x, ids, weights).sum(1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"intermediate_size": -1}, "intermediate_size must be an integer of at least 1, got -1"),
        ({"storage": "int8"}, "storage must be one of fp32, bf16, fp8, got 'int8'"),
    ],
    ids=str,
)
def test_a_pool_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertPool(**{"hidden_size": D, "intermediate_size": I, **options})


gate, up, down = matrices(0)
fp8 = planned(0, "fp8")[0]
assert fp8.scales is not None


@STORAGES
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        pytest.param(
            ExpertWeights(gate[:-1], up, down),
            r"layer 2, expert 3: gate must be \(20, 24\), got \(19, 24\)",
            id="gate",
        ),
        pytest.param(
            ExpertWeights(gate, down, down),
            r"layer 2, expert 3: up must be \(20, 24\), got \(24, 20\)",
            id="up",
        ),
        pytest.param(
            ExpertWeights(gate, up, down.flatten()),
            r"layer 2, expert 3: down must be \(24, 20\), got \(480,\)",
            id="down",
        ),
        pytest.param(
            ExpertWeights(fp8.gate_ID, fp8.up_ID, fp8.down_DI),
            r"layer 2, expert 3: block scales belong to float8_e4m3fn weights and to no others, "
            r"got gate of torch\.float8_e4m3fn",
            id="FP8 without scales",
        ),
        pytest.param(
            ExpertWeights(gate, up, down, fp8.scales, BLOCK),
            r"expert 3: block scales belong .* got gate of torch\.float32",
            id="scales without FP8",
        ),
        pytest.param(
            ExpertWeights(fp8.gate_ID, fp8.up_ID, down, fp8.scales, BLOCK),
            r"expert 3: block scales belong .* got down of torch\.float32",
            id="only some in FP8",
        ),
        pytest.param(
            ExpertWeights(fp8.gate_ID, fp8.up_ID, fp8.down_DI, fp8.scales),
            r"layer 2, expert 3: scales of gate must be \(1, 1\) for blocks of \(128, 128\), got "
            r"\(2, 2\)",
            id="scales of other blocks",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_when_they_are_added(
    weights: ExpertWeights, message: str, storage: Storage
) -> None:
    pool = ExpertPool(D, I, storage=storage)
    pool.add(LAYER, 0, ExpertWeights(gate, up, down))
    with pytest.raises(ConfigError, match=message):
        pool.update({(LAYER, 1): ExpertWeights(gate, up, down), (LAYER, 3): weights})
    # nothing of a refused update is kept
    assert pool.holdings == {LAYER: (0,)}


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (0, -1)])
def test_layers_and_experts_are_numbered_from_zero(layer: int, expert: int) -> None:
    with pytest.raises(ConfigError, match=r"(layer|expert) must be an integer of at least 0, got"):
        ExpertPool(D, I).add(layer, expert, ExpertWeights(gate, up, down))


def test_an_expert_that_is_not_held_cannot_be_removed() -> None:
    pool, _ = pool_of("fp32")
    with pytest.raises(ConfigError, match="layer 2, expert 9 is not held"):
        pool.remove(LAYER, 9)


@pytest.mark.parametrize("change", ["half", "double", "bfloat16"])
def test_a_pools_dtype_cannot_be_changed_behind_its_back(change: str) -> None:
    model = nn.ModuleList([ExpertPool(D, I)])
    with pytest.raises(ConfigError, match="keeps the dtype and device that it was made with"):
        getattr(model, change)()
