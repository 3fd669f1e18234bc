"""A batch split into micro-batches, and their results joined.

What is split: tensors with the batch's rows in dimension 0, and KV caches of transformers (anything
with ``layers``); inside tuples, lists and mappings (``BatchEncoding``, ``ModelOutput``) too.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_eaas.config import check_at_least
from torch_eaas.errors import ConfigError

T = TypeVar("T")


def split_batch(batch: T, parts: int | Sequence[int]) -> list[T]:
    """Split a batch by rows.

    A tensor of one row, or of none, goes whole to every part, and so does everything that is no
    tensor. Tensors of a part are views of the batch's. A cache's part is a new cache.

    Args:
        batch: A tensor, a cache, or tuples, lists and mappings of such.
        parts: How many parts, of sizes that differ by one at most; or each part's rows.

    Raises:
        ConfigError: Rows and parts do not fit, or a tensor has other rows than the first.

    Example:
        Five rows in two parts have 3 and 2 of them.
    """
    num_rows = count_rows(batch)
    sizes = _sizes(num_rows, parts)
    ends = list(itertools.accumulate(sizes))
    return [
        _part(batch, slice(end - size, end), num_rows, "batch")
        for size, end in zip(sizes, ends, strict=True)
    ]


def join_batches(parts: Sequence[T], *, pad_value: float | None = None) -> T:
    """Join what ``split_batch`` split, or what was computed of it, in order.

    Args:
        parts: One result for each micro-batch, all of the same structure. What is neither a
            tensor nor a cache must be equal in all.
        pad_value: Fills up rows of dimension 1 at their end where parts differ there, as texts
            of different lengths do.

    Raises:
        ConfigError: The parts cannot be joined; names where.
    """
    if not parts:
        raise ConfigError("join_batches needs at least one part, got none")
    return parts[0] if len(parts) == 1 else _join(list(parts), pad_value, "result")


def count_rows(batch: Any) -> int:
    """Return the rows of a batch: the size of dimension 0 of its first tensor.

    Raises:
        ConfigError: It has no tensor with rows.
    """
    for tensor in _tensors(batch):
        if tensor.dim():
            return len(tensor)
    raise ConfigError("a batch needs at least one tensor with rows, got none")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_tensors, value))
    elif _is_cache(value):
        for layer in value.layers:
            yield from (t for t in _cached(layer) if t.dim() > 1)


def _sizes(num_rows: int, parts: int | Sequence[int]) -> list[int]:
    if isinstance(parts, int):
        check_at_least("parts", parts, 1)
        if parts > num_rows:
            raise ConfigError(f"parts must be at most the batch's rows ({num_rows}), got {parts}")
        short, longer = divmod(num_rows, parts)
        return [short + (part < longer) for part in range(parts)]
    sizes = list(parts)
    if sum(sizes) != num_rows or min(sizes, default=0) < 1:
        raise ConfigError(f"sizes must be above 0 and add up to {num_rows} rows, got {sizes}")
    return sizes


def _part(value: Any, rows: slice, num_rows: int, where: str) -> Any:
    if isinstance(value, Tensor):
        if value.dim() and len(value) == num_rows:
            return value[rows]
        if value.dim() == 0 or len(value) == 1:
            return value
        raise ConfigError(
            f"{where} has {len(value)} rows where the batch has {num_rows}; "
            f"what is not to be split goes into functools.partial"
        )
    if _is_cache(value):
        return _map_cache([value], lambda tensors: _cache_part(tensors[0], rows, num_rows, where))
    return _rebuilt([value], lambda items, at: _part(items[0], rows, num_rows, where + at))


def _join(values: list[Any], pad_value: float | None, where: str) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise ConfigError(f"{where}: parts of different types cannot be joined, got {kinds}")
    if isinstance(first, Tensor):
        return _cat(values, pad_value, where)
    if _is_cache(first):
        return _map_cache(values, lambda tensors: _cat_cached(tensors, where))
    if isinstance(first, (Mapping, list, tuple)):
        return _rebuilt(values, lambda items, at: _join(items, pad_value, where + at))
    if any(value is not first and value != first for value in values):
        raise ConfigError(f"{where}: parts differ and are no tensors: {values}; use overlap.map")
    return first


def _rebuilt(values: list[Any], build: Callable[[list[Any], str], Any]) -> Any:
    """Return a container like the first, each item made of all containers' items there."""
    first = values[0]
    if isinstance(first, Mapping):
        whole: Any = copy.copy(first)
        for key in first:
            whole[key] = build([value[key] for value in values], f"[{key!r}]")
        return whole
    if isinstance(first, (list, tuple)):
        if len({len(value) for value in values}) > 1:
            raise ConfigError(f"containers of different lengths cannot be joined: {values}")
        items = [build(list(each), f"[{i}]") for i, each in enumerate(zip(*values, strict=True))]
        is_named = hasattr(first, "_fields")
        return type(first)(*items) if is_named else type(first)(items)
    return first


def _cat(tensors: list[Tensor], pad_value: float | None, where: str) -> Tensor:
    if tensors[0].dim() == 0:
        raise ConfigError(f"{where} is a number and has no rows to join; use overlap.map")
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        if pad_value is None or min(tensor.dim() for tensor in tensors) < 2:
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise ConfigError(
                f"{where}: shapes {shapes} differ beyond the rows; join the results of overlap.map "
                f"with join_batches(parts, pad_value=...)"
            )
        longest = max(tensor.shape[1] for tensor in tensors)
        # torch counts dimensions from the last one
        before = [0, 0] * (tensors[0].dim() - 2)
        tensors = [pad(t, [*before, 0, longest - t.shape[1]], value=pad_value) for t in tensors]
    return torch.cat(tensors)


# -- caches ----------------------------------------------------------------------------------------


def _is_cache(value: Any) -> bool:
    """Return whether this is a KV cache as transformers makes them."""
    if not hasattr(value, "get_seq_length"):
        return False
    if not hasattr(value, "layers"):
        raise ConfigError(
            f"a {type(value).__name__} cannot be split; make a cache for each micro-batch and use "
            f"overlap.map"
        )
    return True


def _cached(layer: Any) -> Iterator[Tensor]:
    for value in vars(layer).values():
        yield from (v for _, v in _entries(value) if isinstance(v, Tensor))


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Return what a layer keeps under one name, each with its key."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else [(None, value)]


def _map_cache(caches: list[Any], make: Callable[[list[Tensor]], Tensor]) -> Any:
    """Return a cache of which each tensor is made of the caches' tensors there."""
    whole = copy.copy(caches[0])
    whole.layers = []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layer = copy.copy(layers[0])
        for name, value in vars(layer).items():
            kept = copy.copy(value) if isinstance(value, (dict, list)) else value
            for key, entry in _entries(value):
                if isinstance(entry, Tensor):
                    there = [dict(_entries(getattr(each, name)))[key] for each in layers]
                    if key is None:
                        kept = make(there)
                    else:
                        kept[key] = make(there)
            setattr(layer, name, kept)
        whole.layers.append(layer)
    return whole


def _cache_part(tensor: Tensor, rows: slice, num_rows: int, where: str) -> Tensor:
    if tensor.dim() < 2:
        # a counter, or nothing yet: each part counts for itself
        return tensor.clone()
    if len(tensor) != num_rows:
        raise ConfigError(f"{where}: a cache of {len(tensor)} rows goes with {num_rows} rows")
    return tensor[rows]


def _cat_cached(tensors: list[Tensor], where: str) -> Tensor:
    return tensors[0] if tensors[0].dim() < 2 else _cat(tensors, None, where)
