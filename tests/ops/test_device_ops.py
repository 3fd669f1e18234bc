"""The device path's ops as torch sees them: what they mutate, and what shapes they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops.test_registered_ops import checks_of
from tests.ops.windowed import SPEC, Pair, client_of, numbers, server_of
from torch_eaas.ops import (
    add_replies,
    answer_counts,
    casting,
    choose_replicas,
    clock,
    read_hidden,
    read_requests,
    read_text,
    share_tokens,
    signal,
    slot_scan,
    write_replies,
)
from torch_eaas.ops import write_requests as writes
from torch_eaas.ops.reference_client import Outcome
from torch_eaas.ops.write_replies import refusal_texts
from torch_eaas.protocol.layout import Status

int32 = torch.int32
PAIR = Pair()
PAIR.request(0, 0x101, layer=0)
PAIR.reply(1, 0x102)


def client() -> tuple[torch.Tensor, ...]:
    tables = client_of([PAIR, None], [1, 0])
    tables.words_PS[0, 1] = 0x101
    return tables.pairs_PC, tables.slots_P, tables.words_PS


def server() -> tuple[torch.Tensor, ...]:
    tables = server_of([PAIR, None])
    return tables.pairs_PC, tables.book_3PS


def shares() -> tuple[torch.Tensor, ...]:
    shape = (2, SPEC.max_tokens, SPEC.top_k)
    counts_P, tokens_PT = numbers(2, 0, dtype=int32), torch.zeros(shape[:2], dtype=int32)
    return counts_P, tokens_PT, torch.zeros(shape, dtype=int32), torch.zeros(shape)


# an op's name, and what else is special about the case
CASES: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "choose_replicas": (
        choose_replicas,
        lambda: (
            numbers(0, 2, dtype=int32)[None],
            numbers(1, 0, 1, 0, 1, -1, dtype=int32).view(3, 2),
            2,
        ),
    ),
    "share_tokens": (
        share_tokens,
        # every token is everybody's, so no output has a place that is left as it was
        lambda: (
            numbers(0, 1, 1, 0, dtype=int32).view(2, 2),
            torch.ones(2, 2),
            numbers(0, 1, dtype=int32),
            numbers(0),
            2,
            5,
        ),
    ),
    "add_replies": (
        add_replies,
        lambda: (
            *client()[:2],
            numbers(0, -1, -1, -1, dtype=int32).view(2, 2),
            numbers(0),
            torch.ones(2, SPEC.hidden_size),
            None,
            None,
            False,
        ),
    ),
    "wait_words": (
        signal,
        lambda: (
            *client(),
            numbers(1, 0, dtype=int32),
            numbers(0),
            numbers(0, 0, dtype=int32),
            numbers(0),
            torch.full((2, len(Outcome)), -77),
            5,
            10**8,
            2,
            False,
        ),
    ),
    "read_text": (read_text, lambda: (*client()[:2], 0, 5)),
    "scan_slots": (
        slot_scan,
        lambda: (*server(), numbers(0, 0), numbers(1), numbers(5), 3, 9, 0, 1),
    ),
    "cast_rows": (
        casting,
        # every row is held, so nothing is left as it was
        lambda: (torch.ones(4, 3), torch.float16, numbers(2, 2, dtype=int32)),
    ),
    "count_answers": (
        answer_counts,
        lambda: (
            torch.arange(answer_counts.NUM_COUNTERS),
            numbers(0, 3, -1, dtype=int32),
            numbers(2, 0, 0, dtype=int32),
            numbers(5),
            numbers(9),
        ),
    ),
    "read_requests": (
        read_requests,
        lambda: (
            *server(),
            numbers(0, -1, dtype=int32),
            numbers(0),
            numbers(0, dtype=int32),
            numbers(0, 1, dtype=int32)[None],
            3,
            2,
            numbers(1, 0, dtype=int32),
        ),
    ),
    "read_hidden": (
        read_hidden,
        lambda: (
            *server(),
            numbers(0, -1, dtype=int32),
            numbers(1, 0, dtype=int32),
            torch.full((2, 3, SPEC.hidden_size), -77.0),
            None,
            2,
        ),
    ),
    "read_hidden in fp8": (
        read_hidden,
        lambda: (
            *server(),
            numbers(0, -1, dtype=int32),
            numbers(1, 0, dtype=int32),
            torch.full((2, 3, SPEC.hidden_size), -77.0).to(torch.float8_e4m3fn),
            torch.full((2, 3, 1), -77.0),
            2,
        ),
    ),
    "write_requests": (
        writes,
        lambda: (
            *client(),
            *shares(),
            torch.ones(3, SPEC.hidden_size),
            None,
            numbers(0),
            numbers(0, 0, dtype=int32),
            numbers(1),
            1,
            100,
            2,
        ),
    ),
    "write_requests in fp8": (
        writes,
        lambda: (
            *client(),
            *shares(),
            torch.ones(3, SPEC.hidden_size).to(torch.float8_e4m3fn),
            torch.ones(3, 1),
            numbers(0),
            numbers(0, 0, dtype=int32),
            numbers(1),
            1,
            100,
            2,
        ),
    ),
    "write_replies": (
        write_replies,
        lambda: (
            *server(),
            numbers(0, -1, dtype=int32),
            numbers(Status.OK, -1, dtype=int32),
            numbers(1, 0, dtype=int32),
            torch.ones(6, SPEC.hidden_size),
            refusal_texts(),
            numbers(0, 0, dtype=int32),
            numbers(1),
            numbers(2),
            numbers(3),
            1,
            2,
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_op_keeps_torchs_rules(name: str) -> None:
    given = CASES[name][1]()
    torch.library.opcheck(op_of(name), given, test_utils=checks_of(given))


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_and_mutates_what_the_twin_does(name: str) -> None:
    module, given = CASES[name]
    twins_given, kernels_given = given(), given()
    twins = op_of(name)(*twins_given)
    kernels = module.launch(*kernels_given)
    assert_equal(kernels, twins)
    assert_equal(kernels_given, twins_given)


def op_of(case: str) -> Any:
    return getattr(torch.ops.torch_eaas, case.split()[0]).default


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def assert_equal(got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(bits_of(got), bits_of(expected))
    elif isinstance(expected, tuple | list):
        for ours, theirs in zip(got, expected, strict=True):
            assert_equal(ours, theirs)
    else:
        assert got == expected


def test_the_clock_tells_microseconds_that_pass() -> None:
    first, second = numbers(0), numbers(0)
    clock.read_clock(first)
    clock.read_clock(second)
    assert 0 < int(first) <= int(second) < int(first) + 10**8


def test_the_clocks_op_keeps_torchs_rules() -> None:
    # what it writes differs from call to call, and one check compares two calls
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.torch_eaas.read_clock.default, (numbers(0),), test_utils=checks)


def test_no_op_takes_a_window_as_a_tensor() -> None:
    # a compiler may hand an op a clone of what it mutates: windows are named by address
    for name, (_, given) in CASES.items():
        for tensor in given():
            if isinstance(tensor, torch.Tensor):
                assert tensor.untyped_storage().data_ptr() not in PAIR.memories, name
