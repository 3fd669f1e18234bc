"""The headers of a slot, field by field: every offset below is the specification's."""

from __future__ import annotations

import random
from typing import Any

import pytest

from torch_eaas.protocol.layout import (
    HEADER_BYTES,
    REPLY_FIELDS,
    REPLY_HEADER,
    REQUEST_FIELDS,
    REQUEST_HEADER,
    Field,
    Status,
    field_offsets,
)

SIZES = {"Q": 8, "I": 4}

REQUEST_OFFSETS = {
    "instance": 0,
    "epoch": 8,
    "sequence": 16,
    "placement_version": 24,
    "budget_us": 32,
    "layer": 40,
    "num_tokens": 44,
    "flags": 48,
}
REPLY_OFFSETS = {
    "instance": 0,
    "epoch": 8,
    "sequence": 16,
    "placement_version": 24,
    "status": 32,
    "size": 36,
    "queue_us": 40,
    "experts_us": 44,
}
HEADERS = pytest.mark.parametrize(
    ("table", "packer", "offsets"),
    [
        pytest.param(REQUEST_FIELDS, REQUEST_HEADER, REQUEST_OFFSETS, id="request"),
        pytest.param(REPLY_FIELDS, REPLY_HEADER, REPLY_OFFSETS, id="reply"),
    ],
)


@HEADERS
def test_every_field_lies_where_the_specification_says(
    table: tuple[Field, ...], packer: Any, offsets: dict[str, int]
) -> None:
    assert field_offsets(table) == offsets


@HEADERS
def test_fields_are_aligned_do_not_overlap_and_fit_the_header(
    table: tuple[Field, ...], packer: Any, offsets: dict[str, int]
) -> None:
    end = 0
    for field in table:
        assert offsets[field.name] >= end
        assert offsets[field.name] % SIZES[field.code] == 0
        end = offsets[field.name] + SIZES[field.code]
    assert packer.size == end
    assert end <= HEADER_BYTES == 128


@HEADERS
def test_a_packed_header_holds_each_number_little_endian_at_its_offset(
    table: tuple[Field, ...], packer: Any, offsets: dict[str, int]
) -> None:
    rng = random.Random(1)
    for numbers in (
        [rng.randrange(256 ** SIZES[field.code]) for field in table],
        [256 ** SIZES[field.code] - 1 for field in table],
        [0 for _ in table],
    ):
        data = packer.pack(*numbers)
        for field, number in zip(table, numbers, strict=True):
            at = offsets[field.name]
            assert int.from_bytes(data[at : at + SIZES[field.code]], "little") == number
        assert packer.unpack(data) == tuple(numbers)


def test_both_headers_begin_alike_so_that_an_answer_can_be_matched_without_its_kind() -> None:
    common = [field.name for field in REQUEST_FIELDS[:4]]
    assert common == [field.name for field in REPLY_FIELDS[:4]]
    assert common == ["instance", "epoch", "sequence", "placement_version"]


def test_status_numbers_are_those_of_the_wire_and_only_a_bad_request_is_final() -> None:
    assert {status.name: int(status) for status in Status} == {
        "OK": 0,
        "UNKNOWN_EXPERT": 1,
        "BAD_REQUEST": 2,
        "DRAINING": 3,
        "OVERLOADED": 4,
        "EXPIRED": 5,
        "INTERNAL": 6,
        "STALE": 7,
    }
    assert [status.name for status in Status if not status.may_retry] == ["BAD_REQUEST"]
