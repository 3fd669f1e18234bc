"""Sizes and places of a slot's parts: every number below is arithmetic done here."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_eaas.config import ClientConfig
from torch_eaas.errors import ConfigError
from torch_eaas.protocol.layout import PairSpec, align

ITEM = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
MIB = 2**20

R1 = PairSpec(hidden_size=7168, top_k=8, slots=4, max_tokens=128, wire_dtype="bf16")
R1_EXACT = PairSpec(
    hidden_size=7168, top_k=8, slots=4, max_tokens=128, wire_dtype="bf16", combine="exact"
)
SPECS = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(
            PairSpec(hidden_size=300, top_k=2, slots=3, max_tokens=5, wire_dtype="fp8"), id="fp8"
        ),
        pytest.param(PairSpec(hidden_size=1, top_k=1, slots=1, max_tokens=1), id="smallest"),
        pytest.param(PairSpec(hidden_size=63, top_k=3, slots=5, max_tokens=7), id="odd"),
        pytest.param(
            PairSpec(hidden_size=63, top_k=3, slots=17, max_tokens=7, combine="exact"), id="exact"
        ),
        pytest.param(
            PairSpec(
                hidden_size=8,
                top_k=2,
                slots=64,
                max_tokens=4,
                wire_dtype="fp16",
                reply_dtype="bf16",
            ),
            id="16 bits both ways",
        ),
        pytest.param(R1, id="R1"),
        pytest.param(R1_EXACT, id="R1 exact"),
    ],
)

specs = st.builds(
    PairSpec,
    hidden_size=st.integers(1, 300),
    top_k=st.integers(1, 9),
    slots=st.integers(1, 64),
    max_tokens=st.integers(1, 70),
    wire_dtype=st.sampled_from(["fp32", "bf16", "fp16", "fp8"]),
    reply_dtype=st.sampled_from(["fp32", "bf16"]),
    combine=st.sampled_from(["partial", "exact"]),
)


def up(size: int) -> int:
    """Round up to 128, by counting."""
    return next(n for n in range(size, size + 128) if n % 128 == 0)


def scales_bytes(spec: PairSpec) -> int:
    """Return the bytes of a slot's scales, by counting: one of 4 bytes for each 128 numbers."""
    per_token = len(range(0, spec.hidden_size, 128)) if spec.wire_dtype == "fp8" else 0
    return spec.max_tokens * per_token * 4


def request_parts(spec: PairSpec) -> list[tuple[int, int]]:
    """Return start and end of everything in a request window."""
    parts = [(slot * 8, slot * 8 + 8) for slot in range(spec.slots)]
    numbers = spec.max_tokens * spec.top_k
    hidden = spec.max_tokens * spec.hidden_size * ITEM[spec.wire_dtype]
    for slot in range(spec.slots):
        base = spec.request_slot(slot)
        for offset, size in (
            (0, 128),
            (spec.ids_offset, numbers * 4),
            (spec.weights_offset, numbers * 4),
            (spec.scales_offset, scales_bytes(spec)),
            (spec.hidden_offset, hidden),
        ):
            if size:
                parts.append((base + offset, base + offset + size))
    return parts


def reply_parts(spec: PairSpec) -> list[tuple[int, int]]:
    """Return start and end of everything in a reply window."""
    parts = [(slot * 8, slot * 8 + 8) for slot in range(spec.slots)]
    rows = spec.max_tokens * (spec.top_k if spec.combine == "exact" else 1)
    for slot in range(spec.slots):
        base = spec.reply_slot(slot)
        start = base + spec.rows_offset
        parts.append((base, base + 128))
        parts.append((start, start + rows * spec.hidden_size * ITEM[spec.reply_dtype]))
    return parts


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 255, 256, 257, 10**9 + 1])
def test_align_gives_the_next_multiple_of_128(size: int) -> None:
    assert align(size) == up(size)


@SPECS
def test_sizes_and_offsets_are_the_sums_of_their_aligned_parts(spec: PairSpec) -> None:
    numbers = up(spec.max_tokens * spec.top_k * 4)
    hidden = up(spec.max_tokens * spec.hidden_size * ITEM[spec.wire_dtype])
    rows = spec.max_tokens * (spec.top_k if spec.combine == "exact" else 1)
    answer = up(rows * spec.hidden_size * ITEM[spec.reply_dtype])
    words = up(spec.slots * 8)
    before_hidden = 128 + 2 * numbers + up(scales_bytes(spec))

    assert spec.ids_offset == 128
    assert spec.weights_offset == 128 + numbers
    assert spec.scales_offset == 128 + 2 * numbers
    assert spec.hidden_offset == before_hidden
    assert spec.request_slot_bytes == before_hidden + hidden
    assert spec.request_bytes == words + spec.slots * (before_hidden + hidden)
    assert spec.rows_offset == 128
    assert spec.reply_rows_bytes == answer
    assert spec.reply_slot_bytes == 128 + answer
    assert spec.reply_bytes == words + spec.slots * (128 + answer)
    for slot in range(spec.slots):
        assert spec.request_slot(slot) == words + slot * (before_hidden + hidden)
        assert spec.reply_slot(slot) == words + slot * (128 + answer)


@given(specs)
def test_no_two_parts_of_a_window_overlap_and_all_lie_within_it(spec: PairSpec) -> None:
    for parts, size in (
        (request_parts(spec), spec.request_bytes),
        (reply_parts(spec), spec.reply_bytes),
    ):
        ordered = sorted(parts)
        assert ordered[0][0] == 0
        assert ordered[-1][1] <= size
        for (_, end), (start, _) in itertools.pairwise(ordered):
            assert end <= start


@given(specs)
def test_every_part_but_the_words_starts_at_a_multiple_of_128(spec: PairSpec) -> None:
    for parts in (request_parts(spec), reply_parts(spec)):
        assert all(start % 128 == 0 for start, _ in parts[spec.slots :])
    assert spec.request_bytes % 128 == spec.reply_bytes % 128 == 0


def test_r1_takes_7_mib_at_the_server_and_14_or_112_at_the_client() -> None:
    # 128 tokens: header, ids and weights 4 bytes each for 8 experts, hidden 2 bytes
    assert R1.request_bytes == 128 + 4 * (128 + 2 * 128 * 8 * 4 + 128 * 7168 * 2) == 7_373_440
    assert R1.reply_bytes == 128 + 4 * (128 + 128 * 7168 * 4) == 14_680_704
    assert R1_EXACT.reply_bytes == 128 + 4 * (128 + 128 * 8 * 7168 * 4) == 117_441_152
    assert round(R1.request_bytes / MIB) == 7
    assert round(R1.reply_bytes / MIB) == 14
    assert round(R1_EXACT.reply_bytes / MIB) == 112


def test_a_request_of_few_tokens_is_one_piece_far_shorter_than_its_slot() -> None:
    used = R1.hidden_offset + 1 * 7168 * 2
    assert used == 128 + 2 * 4096 + 14336
    assert used < R1.request_slot_bytes / 80


def test_an_r1_token_has_56_scales_in_fp8_and_the_slot_is_little_more_than_half_of_bf16s() -> None:
    fp8 = dataclasses.replace(R1, wire_dtype="fp8")
    assert fp8.scales_per_token == 7168 / 128 == 56
    # hidden, scales, ids and weights
    assert fp8.request_slot_bytes == 128 + 128 * (7168 + 56 * 4 + 2 * 8 * 4) == 954_496
    assert R1.scales_per_token == 0


# -- what a spec refuses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, r"hidden_size must be an integer of at least 1, got 0"),
        ({"top_k": -1}, r"top_k must be an integer of at least 1, got -1"),
        ({"slots": 0}, r"slots must be an integer of at least 1, got 0"),
        ({"max_tokens": 2.0}, r"max_tokens must be an integer of at least 1, got 2\.0"),
        ({"hidden_size": "8"}, r"hidden_size must be an integer of at least 1, got '8'"),
        ({"hidden_size": True}, r"hidden_size must be an integer of at least 1, got True"),
        ({"wire_dtype": "fp64"}, r"wire_dtype must be one of fp32, bf16, fp16, fp8, got 'fp64'"),
        ({"wire_dtype": []}, r"wire_dtype must be one of fp32, bf16, fp16, fp8, got \[\]"),
        ({"reply_dtype": "fp16"}, r"reply_dtype must be one of fp32, bf16, got 'fp16'"),
        ({"combine": "sum"}, r"combine must be one of partial, exact, got 'sum'"),
        ({"slots": 65}, r"at most 64 slots of 65536 tokens, got 65 of 4"),
        ({"max_tokens": 65537}, r"at most 64 slots of 65536 tokens, got 2 of 65537"),
        ({"hidden_size": 10**4299}, r"hidden_size must be at most 8589934592, got 10+$"),
        ({"top_k": 1 << 34, "combine": "exact"}, r"top_k must be at most 8589934592, got 17"),
        (
            {"max_tokens": 65536, "hidden_size": 65536},
            r"at most 8589934592 bytes, .* needs \d+; lower max_tokens or max_micro_batches",
        ),
    ],
    ids=str,
)
def test_a_spec_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    spec: dict[str, Any] = {"hidden_size": 8, "top_k": 2, "slots": 2, "max_tokens": 4}
    with pytest.raises(ConfigError, match=message):
        PairSpec(**{**spec, **changes})


@SPECS
def test_a_spec_survives_json(spec: PairSpec) -> None:
    again = PairSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.request_bytes == spec.request_bytes


def test_a_spec_in_json_has_all_fields_and_no_others() -> None:
    data = R1.to_json()
    assert data == {
        "hidden_size": 7168,
        "top_k": 8,
        "slots": 4,
        "max_tokens": 128,
        "wire_dtype": "bf16",
        "reply_dtype": "fp32",
        "combine": "partial",
    }
    with pytest.raises(ConfigError, match=r"a pair's spec has the fields \['combine', .*'zeros'"):
        PairSpec.from_json({**data, "zeros": 1})
    del data["top_k"]
    with pytest.raises(ConfigError, match=r"a pair's spec has the fields"):
        PairSpec.from_json(data)


def test_a_spec_of_a_clients_options_has_a_slot_more_than_micro_batches() -> None:
    config = ClientConfig(
        hidden_size=7168,
        top_k=8,
        max_tokens=64,
        max_micro_batches=2,
        wire_dtype="fp8",
        reply_dtype="bf16",
        combine="exact",
    )
    assert PairSpec.of(config) == PairSpec(
        hidden_size=7168,
        top_k=8,
        slots=3,
        max_tokens=64,
        wire_dtype="fp8",
        reply_dtype="bf16",
        combine="exact",
    )
