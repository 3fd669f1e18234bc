"""The client's stages around the windows: who gets which token, and the sum of the answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.windowed import Pair, client_of, numbers
from torch_eaas.client_pieces import split
from torch_eaas.errors import ConfigError
from torch_eaas.ops.add_replies import add_replies
from torch_eaas.ops.read_text import read_text
from torch_eaas.ops.reference_client import WAIT_FAILED, missing_expert
from torch_eaas.ops.share_tokens import share_tokens
from torch_eaas.protocol.layout import HEADER_BYTES, PairSpec

pytestmark = pytest.mark.usefixtures("implementation", "poisoned_empty")

int32 = torch.int32


def ints(values: list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=int32)


# -- sharing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "skew"),
    [(1, 1, False), (1, 8, False), (63, 3, False), (200, 8, False), (300, 8, True)],
    ids=str,
)
def test_each_pair_gets_what_a_host_driven_client_would_send_it(
    num_tokens: int, top_k: int, skew: bool
) -> None:
    made = torch.Generator().manual_seed(num_tokens)
    num_experts, num_pairs = 16, 4
    ids_TK = torch.randint(-1, num_experts, (num_tokens, top_k), generator=made, dtype=int32)
    if skew:
        ids_TK[:, 1:] = -1
        ids_TK[7:, 0] = 3
    weights_TK = torch.rand(num_tokens, top_k, generator=made)
    # nobody runs anything on pair 2
    pairs_E = torch.tensor([0, 1, 3, 1], dtype=int32).repeat(num_experts // 4)
    abort = numbers(0)
    shares, places_PT = share_tokens(ids_TK, weights_TK, pairs_E, abort, num_pairs, layer=1)
    assert abort.tolist() == [0]

    servers_TK = np.where(ids_TK.numpy() < 0, -1, pairs_E.numpy()[ids_TK.numpy()]).astype(np.int16)
    pieces = split(
        servers_TK, ids_TK.numpy().astype(np.int64), weights_TK.numpy(), num_pairs, num_tokens
    )
    counts = [0] * num_pairs
    places = np.full((num_pairs, num_tokens), -1)
    for piece in pieces:
        p, count = piece.server, len(piece.rows_n)
        counts[p] = count
        places[p, piece.rows_n] = np.arange(count)
        assert shares.tokens_PT[p, :count].tolist() == piece.rows_n.tolist()
        assert shares.ids_PTK[p, :count].tolist() == piece.ids_nK.tolist()
        assert shares.weights_PTK[p, :count].tolist() == piece.weights_nK.tolist()
    assert shares.counts_P.tolist() == counts
    assert places_PT.tolist() == places.tolist()


def test_the_docstrings_example_of_sharing_holds() -> None:
    ids_TK, weights_TK = ints([[0, 2], [2, 1]]), torch.ones(2, 2)
    pairs_E = numbers(1, 0, 0, dtype=int32)
    shares, places_PT = share_tokens(ids_TK, weights_TK, pairs_E, numbers(0), 2, layer=1)
    assert shares.counts_P.tolist() == [2, 1]
    assert shares.tokens_PT[1, 0] == 0
    assert shares.ids_PTK[1, 0].tolist() == [0, -1]
    assert shares.ids_PTK[0].tolist() == [[-1, 2], [2, 1]]
    assert places_PT.tolist() == [[0, 1], [0, -1]]


@pytest.mark.parametrize("layer", [0, 1, 2**31 - 1], ids=str)
@pytest.mark.parametrize("expert", [1, 4, 2**31 - 1], ids=["held by nobody", "E + 1", "far beyond"])
def test_an_expert_without_a_pair_aborts_the_step_and_the_abort_word_names_it(
    expert: int, layer: int
) -> None:
    abort = numbers(0)
    pairs_E = numbers(0, -1, 0, dtype=int32)
    shares, _ = share_tokens(
        ints([[0, -1], [expert, 2]]), torch.ones(2, 2), pairs_E, abort, 2, layer=layer
    )
    assert abort.tolist() == [layer * 2**32 + expert + 2]
    assert missing_expert(int(abort)) == (layer, expert)
    assert shares.ids_PTK[0].tolist() == [[0, -1], [-1, 2]]


def test_an_expert_without_a_pair_is_not_named_where_the_step_has_failed_before() -> None:
    abort = numbers(WAIT_FAILED)
    share_tokens(ints([[0]]), torch.ones(1, 1), numbers(-1, dtype=int32), abort, 2, layer=7)
    assert abort.tolist() == [WAIT_FAILED]
    assert missing_expert(WAIT_FAILED) is None
    assert missing_expert(0) is None


def test_rows_of_no_expert_make_no_request_and_the_number_of_experts_is_none_too() -> None:
    abort = numbers(0)
    pairs_E = numbers(0, dtype=int32)
    shares, places_PT = share_tokens(
        ints([[-1], [1]]), torch.ones(2, 1), pairs_E, abort, 2, layer=1
    )
    assert shares.counts_P.tolist() == [0, 0]
    assert places_PT.tolist() == [[-1, -1]] * 2
    assert abort.tolist() == [0]


def test_ids_in_another_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ids_TK must be int32, got torch.int64; cast it first"):
        share_tokens(
            numbers(0)[None], torch.ones(1, 1), numbers(0, dtype=int32), numbers(0), 1, layer=1
        )


# -- adding ------------------------------------------------------------------------------------


def answered(pair: Pair, slot: int, rows: Tensor) -> None:
    """Put rows into a reply slot."""
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    at = pair.spec.reply_slot(slot) + HEADER_BYTES
    pair.replies[at : at + len(data)] = data


def test_the_docstrings_example_of_adding_holds_whatever_is_added() -> None:
    spec = PairSpec(hidden_size=1, top_k=2, slots=4, max_tokens=3)
    pairs = [Pair(spec=spec), Pair(spec=spec)]
    answered(pairs[0], 3, torch.tensor([[5.0]]))
    answered(pairs[1], 1, torch.tensor([[1.0], [2.0]]))
    tables = client_of(list(pairs), [3, 1])
    places_PT = ints([[-1, 0], [0, 1]])
    add_TD = torch.tensor([[10.0], [20.0]])
    out_TD = add_replies(tables, places_PT, numbers(0), add_TD, reply_dtype=torch.float32)
    assert out_TD.tolist() == [[11.0], [27.0]]
    out_TD = add_replies(tables, places_PT, numbers(1), add_TD, reply_dtype=torch.float32)
    assert out_TD.tolist() == add_TD.tolist()


@pytest.mark.parametrize("hidden", [1, 63, 1500])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("is_exact", [False, True], ids=["partial", "exact"])
def test_sums_are_made_in_server_order_or_in_order_of_k(
    hidden: int, dtype: str, is_exact: bool
) -> None:
    reply_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    options = {"reply_dtype": dtype, "combine": "exact" if is_exact else "partial"}
    spec = PairSpec(hidden_size=hidden, top_k=3, slots=4, max_tokens=3, **options)  # type: ignore[arg-type]  # names of the lists above
    pairs = [Pair(spec=spec) for _ in range(3)]
    ids_TK, pairs_E = ints([[0, 1, 2], [2, -1, 1], [-1, -1, -1]]), numbers(2, 0, 2, dtype=int32)
    _, places_PT = share_tokens(ids_TK, torch.ones(3, 3), pairs_E, numbers(0), 3, layer=1)
    made = torch.Generator().manual_seed(hidden)
    # numbers of such different sizes that another order has other bits
    rows = torch.randn(3, *spec.rows_shape, generator=made)
    rows = (rows * 10.0 ** torch.arange(-3, 0).view(3, *[1] * (rows.ndim - 1))).to(reply_dtype)
    for pair, its in zip(pairs, rows, strict=True):
        answered(pair, 2, its)
    add_TD = torch.randn(3, hidden, generator=made)
    out_TD = add_replies(
        client_of(list(pairs), [2, 2, 2]),
        places_PT,
        numbers(0),
        add_TD,
        reply_dtype=reply_dtype,
        exact_ids_TK=ids_TK if is_exact else None,
        pairs_E=pairs_E if is_exact else None,
    )
    rows = rows.float()
    if is_exact:
        # token 0 is row 0 of pairs 0 and 2, token 1 row 1 of both
        sums = [(rows[2, 0, 0] + rows[0, 0, 1]) + rows[2, 0, 2], rows[2, 1, 0] + rows[0, 1, 2]]
    else:
        sums = [rows[0, 0] + rows[2, 0], rows[0, 1] + rows[2, 1]]
    expected_TD = torch.stack([*sums, torch.zeros(hidden)]) + add_TD
    torch.testing.assert_close(out_TD, expected_TD, rtol=0, atol=0)


def test_what_does_not_go_together_is_refused() -> None:
    tables, places_PT, add_TD = client_of([None], [0]), ints([[-1]]), torch.zeros(1, 1)
    with pytest.raises(ConfigError, match=r"reply_dtype must be float32 or bfloat16, got .*16"):
        add_replies(tables, places_PT, numbers(0), add_TD, reply_dtype=torch.float16)
    with pytest.raises(ConfigError, match="exact_ids_TK and pairs_E go together: give both"):
        add_replies(
            tables,
            places_PT,
            numbers(0),
            add_TD,
            reply_dtype=torch.float32,
            exact_ids_TK=places_PT,
        )


# -- an error's text -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        pytest.param(0, "", id="none"),
        pytest.param(5, "full!", id="some"),
        # rows of 3 tokens x 6 numbers, rounded up to 128 bytes
        pytest.param(2**32 - 1, "full!" + "x" * 123, id="more than the slot holds"),
    ],
)
def test_a_text_is_read_where_it_lies_and_not_beyond_its_slot(size: int, expected: str) -> None:
    pair = Pair()
    at = pair.spec.reply_slot(2) + HEADER_BYTES
    pair.replies[at : at + 200] = b"full!" + b"x" * 195
    assert read_text(client_of([None, pair], [0, 2]), 1, size) == expected
