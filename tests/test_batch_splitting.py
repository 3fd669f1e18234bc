"""Batches split into micro-batches and joined again."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_eaas
from torch_eaas.batch_splitting import count_rows, join_batches, split_batch
from torch_eaas.errors import ConfigError

SHAKESPEARE = Path(torch_eaas.__file__).parent / "assets" / "shakespeare"


class Pair(NamedTuple):
    ids: torch.Tensor
    rest: Any


@given(st.integers(1, 17), st.integers(1, 5))
def test_every_row_comes_once_in_order_and_sizes_differ_by_one(rows: int, parts: int) -> None:
    batch = torch.arange(rows * 3).view(rows, 3)
    if parts > rows:
        with pytest.raises(ConfigError, match=rf"at most the batch's rows \({rows}\), got {parts}"):
            split_batch(batch, parts)
        return
    split = split_batch(batch, parts)
    sizes = [len(part) for part in split]
    assert (len(sizes), sum(sizes), max(sizes) - min(sizes) <= 1) == (parts, rows, True)
    assert sizes == sorted(sizes, reverse=True)
    assert torch.equal(join_batches(split), batch)
    assert split[-1].data_ptr() == batch[-sizes[-1]].data_ptr()


def test_sizes_may_be_uneven() -> None:
    batch = torch.arange(9)
    parts = split_batch(batch, [1, 6, 2])
    assert [part.tolist() for part in parts] == [[0], [1, 2, 3, 4, 5, 6], [7, 8]]


@pytest.mark.parametrize("sizes", [[4, 4], [9, 0], [10, -1], []], ids=str)
def test_sizes_that_do_not_add_up_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="sizes must be above 0 and add up to 9 rows"):
        split_batch(torch.arange(9), sizes)


def test_containers_are_split_inside_and_what_has_no_rows_goes_whole() -> None:
    options, number, row = object(), torch.tensor(3.0), torch.ones(1, 7)
    batch = ({"ids": torch.arange(4), "o": options}, [number, row], Pair(torch.eye(4), None))
    first, second = split_batch(batch, 2)
    assert first[0]["ids"].tolist() == [0, 1]
    assert second[0]["ids"].tolist() == [2, 3]
    assert second[0]["o"] is options
    assert first[1][0] is second[1][0] is number
    assert second[1][1] is row
    assert torch.equal(second[2].ids, torch.eye(4)[2:])
    assert type(second[2]) is Pair


def test_another_number_of_rows_is_named() -> None:
    message = r"batch\['b'\]\[1\] has 7 rows where the batch has 4; what is not to be split"
    with pytest.raises(ConfigError, match=message):
        split_batch({"a": torch.ones(4), "b": [None, torch.ones(7)]}, 2)


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one tensor with rows"):
        count_rows([torch.tensor(1.0), "text"])
    with pytest.raises(ConfigError, match="at least one part, got none"):
        join_batches([])
    with pytest.raises(ConfigError, match="parts must be an integer of at least 1, got 0"):
        split_batch(torch.ones(3), 0)


def test_texts_of_different_lengths_are_filled_up_on_request() -> None:
    parts = [torch.tensor([[1, 2, 3]]), torch.tensor([[4], [5]])]
    with pytest.raises(ConfigError, match=r"result: shapes \[\(1, 3\), \(2, 1\)\] differ beyond"):
        join_batches(parts)
    joined = join_batches(parts, pad_value=9)
    assert joined.tolist() == [[1, 2, 3], [4, 9, 9], [5, 9, 9]]
    deep = [torch.ones(1, 1, 2), torch.ones(1, 2, 2)]
    assert join_batches(deep, pad_value=0)[0].tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([torch.tensor(1.0), torch.tensor(2.0)], "result is a number and has no rows to join"),
        ([{"n": 1}, {"n": 2}], r"result\['n'\]: parts differ and are no tensors: \[1, 2\]"),
        ([1, "a"], "result: parts of different types cannot be joined, got int, str"),
        ([[1], [1, 1]], "containers of different lengths cannot be joined"),
    ],
    ids=["number", "differ", "types", "lengths"],
)
def test_what_cannot_be_joined_is_named(parts: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        join_batches(parts)


def test_equal_things_that_are_no_tensors_stay() -> None:
    assert join_batches([("text", None, 3), ("text", None, 3)]) == ("text", None, 3)


# -- transformers ----------------------------------------------------------------------------------


def test_a_batch_encoding_stays_one() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(6).view(3, 2)})
    first, second = split_batch(batch, 2)
    assert type(first) is type(second) is transformers.BatchEncoding
    assert batch["input_ids"].shape == (3, 2)
    assert second.input_ids.tolist() == [[4, 5]]
    assert torch.equal(join_batches([first, second])["input_ids"], batch["input_ids"])


def test_a_cache_is_split_and_joined_and_each_part_grows_alone() -> None:
    pytest.importorskip("transformers")
    from torch_eaas.models.load import load_local

    model = load_local(SHAKESPEARE)
    # transformers renames it
    is_new = "cache" in inspect.signature(model.forward).parameters
    name = "cache" if is_new else "past_key_values"
    ids = torch.arange(40, 60).view(5, 4)
    with torch.no_grad():
        before = model(ids, use_cache=True)
        cache = before[name]
        kept = cache.layers[0].keys.clone()
        pairs = split_batch((ids[:, :1], cache), [2, 3])
        parts = [model(new, **{name: own}) for new, own in pairs]
        assert torch.equal(cache.layers[0].keys, kept)
        whole = model(ids[:, :1], **{name: cache})
    joined = join_batches(parts)
    assert type(joined) is type(whole)
    torch.testing.assert_close(joined.logits, whole.logits)
    assert joined.past_key_values.get_seq_length() == 5
    for mine, plain in zip(
        joined.past_key_values.layers, whole.past_key_values.layers, strict=True
    ):
        torch.testing.assert_close(mine.keys, plain.keys)
        torch.testing.assert_close(mine.values, plain.values)


def test_a_static_caches_counters_are_each_parts_own() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.StaticCache(transformers.LlamaConfig(num_hidden_layers=1), max_cache_len=8)
    keys = torch.randn(4, 32, 2, 128)
    cache.update(keys, keys, 0)
    first, second = split_batch(cache, 2)
    first.update(keys[:2], keys[:2], 0)
    assert (int(first.get_seq_length()), int(second.get_seq_length())) == (4, 2)


def test_an_empty_cache_gives_empty_caches_of_their_own() -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.arange(4).view(2, 2)
    (_, first), (_, second) = split_batch((ids, transformers.DynamicCache()), 2)
    first.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
    assert (first.get_seq_length(), second.get_seq_length()) == (1, 0)


def test_a_cache_of_other_rows_or_of_another_make_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    cache.update(torch.ones(3, 1, 1, 1), torch.ones(3, 1, 1, 1), 0)
    with pytest.raises(ConfigError, match=r"batch\[1\]: a cache of 3 rows goes with 2 rows"):
        split_batch((torch.ones(2, 1), cache), 2)
    both = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    with pytest.raises(ConfigError, match="EncoderDecoderCache cannot be split; make a cache for"):
        split_batch((torch.ones(2, 1), both), 2)
