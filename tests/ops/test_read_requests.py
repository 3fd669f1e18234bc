"""Requests are copied once and checked in the copy, in the order of the specification."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from tests.ops.windowed import SPEC, Pair, numbers, server_of
from torch_eaas.errors import ConfigError
from torch_eaas.ops.pair_table import ServerTables, signed
from torch_eaas.ops.read_requests import Requests, read_requests
from torch_eaas.protocol.layout import Status

pytestmark = pytest.mark.usefixtures("implementation", "poisoned_empty")

T, K = SPEC.max_tokens, SPEC.top_k
# layer 0 holds nothing, layer 1 experts 0 and 2
GROUPS = torch.tensor([[-1, -1, -1], [4, -1, 5]], dtype=torch.int32)
NOW = 5000


def read(
    pair: Pair,
    entries: list[int],
    *,
    since: int = NOW,
    draining: int = 0,
    groups: Any = GROUPS,
    admitted: list[int] | None = None,
) -> tuple[ServerTables, Requests]:
    tables = server_of([None, pair])
    tables.book_3PS[1, 1] = since
    requests = read_requests(
        tables,
        numbers(*entries, dtype=torch.int32),
        numbers(NOW),
        numbers(draining, dtype=torch.int32),
        groups,
        max_tokens=T,
        top_k=K,
        tokens_R=None if admitted is None else numbers(*admitted, dtype=torch.int32),
    )
    return tables, requests


def status_of(pair: Pair, **options: Any) -> Status:
    _, requests = read(pair, [4], **options)
    status = Status(int(requests.statuses_R[0]))
    assert requests.num_tokens_R.tolist() == [1 if status is Status.OK else 0]
    return status


def test_a_good_request_gives_header_ids_and_weights_and_is_taken() -> None:
    pair = Pair(instance=2**64 - 2, epoch=3)
    pair.request(2, 0x901, layer=1, num_tokens=2, placement_version=6, budget_us=77)
    pair.ids(2, [[2, -1], [0, 2]])
    at = pair.spec.request_slot(2) + pair.spec.weights_offset
    pair.requests[at : at + 16] = struct.pack("<4f", 0.5, 0.25, 1.0, 2.0)
    tables, requests = read(pair, [4 + 2, -1])
    assert requests.statuses_R.tolist() == [Status.OK, -1]
    header = [signed(2**64 - 2), 3, 9, 6, 77, 1, 2, 0]
    assert requests.headers_RF.tolist() == [header, [0] * 8]
    assert requests.layers_R.tolist() == [1, 0]
    assert requests.num_tokens_R.tolist() == [2, 0]
    nothing = [-1, -1]
    assert requests.ids_RTK.tolist() == [[[2, -1], [0, 2], nothing], [nothing] * T]
    # the last row is none, so what the window holds there was not looked at
    assert requests.weights_RTK.tolist()[0] == [[0.5, 0.25], [1.0, 2.0], [0.0, 0.0]]
    assert tables.book_3PS[2].tolist() == [[0] * 4, [0, 0, 0x901, 0]]


BAD = [
    pytest.param({"instance": 8}, Status.STALE, id="another instance"),
    pytest.param({"epoch": 2}, Status.STALE, id="another epoch"),
    pytest.param({"sequence": 2}, Status.STALE, id="another sequence than the word's"),
    pytest.param({"num_tokens": 0}, Status.BAD_REQUEST, id="no tokens"),
    pytest.param({"num_tokens": T + 1}, Status.BAD_REQUEST, id="one token too many"),
    pytest.param({"num_tokens": 2**32 - 1}, Status.BAD_REQUEST, id="2**32 - 1 tokens"),
    pytest.param({"flags": 1}, Status.BAD_REQUEST, id="a flag"),
    pytest.param({"layer": 2}, Status.UNKNOWN_EXPERT, id="a layer beyond the held ones"),
    pytest.param({"layer": 2**32 - 1}, Status.UNKNOWN_EXPERT, id="layer 2**32 - 1"),
    pytest.param({"layer": 0}, Status.UNKNOWN_EXPERT, id="a layer that holds nothing"),
    pytest.param({"budget_us": 0}, Status.OK, id="no budget, and no time has passed"),
    pytest.param({"budget_us": 2**64 - 1}, Status.OK, id="2**64 - 1 us of budget"),
]


@pytest.mark.parametrize(("changed", "status"), BAD)
def test_a_header_is_answered_with_the_status_of_what_is_wrong(
    changed: dict[str, int], status: Status
) -> None:
    pair = Pair()
    pair.request(0, 0x101, **{"layer": 1, **changed})
    assert status_of(pair) is status


@pytest.mark.parametrize(
    ("ids", "status"),
    [
        ([[-1, -1]], Status.OK),
        ([[1, 0]], Status.UNKNOWN_EXPERT),
        ([[3, 0]], Status.UNKNOWN_EXPERT),
        ([[2**31 - 1, 0]], Status.UNKNOWN_EXPERT),
        ([[0, -2]], Status.BAD_REQUEST),
        ([[1, -(2**31)]], Status.BAD_REQUEST),
    ],
    ids=str,
)
def test_ids_are_answered_with_the_status_of_what_is_wrong(
    ids: list[list[int]], status: Status
) -> None:
    pair = Pair()
    pair.request(0, 0x101, layer=1)
    pair.ids(0, ids)
    assert status_of(pair) is status


def test_a_request_of_no_expert_at_all_is_good_in_a_layer_that_is_not_held() -> None:
    pair = Pair()
    pair.request(0, 0x101, layer=9)
    pair.ids(0, [[-1, -1]])
    assert status_of(pair) is Status.OK


@pytest.mark.parametrize(("waited", "status"), [(77, Status.OK), (78, Status.EXPIRED)])
def test_a_request_whose_budget_is_over_has_expired(waited: int, status: Status) -> None:
    pair = Pair()
    pair.request(0, 0x101, layer=1, budget_us=77)
    assert status_of(pair, since=NOW - waited) is status


def test_of_several_faults_the_first_of_the_specification_counts() -> None:
    pair = Pair()
    pair.request(0, 0x101, layer=0, budget_us=0, num_tokens=T + 1, epoch=2)
    pair.ids(0, [[-2, 1]])
    order = [status_of(pair, since=0, draining=1), status_of(pair, since=0)]
    pair.request(0, 0x101, layer=0, budget_us=0, num_tokens=T + 1)
    order.append(status_of(pair, since=0))
    pair.request(0, 0x101, layer=0, budget_us=0)
    order.append(status_of(pair, since=0))
    pair.request(0, 0x101, layer=0)
    order.append(status_of(pair))
    pair.ids(0, [[-1, 1]])
    order.append(status_of(pair))
    assert [status.name for status in order] == [
        *("DRAINING", "STALE", "BAD_REQUEST", "EXPIRED", "BAD_REQUEST", "UNKNOWN_EXPERT")
    ]


def test_more_rows_than_a_block_has_are_all_read() -> None:
    spec = type(SPEC)(hidden_size=2, top_k=8, slots=1, max_tokens=200)
    pair = Pair(spec=spec)
    pair.request(0, 0x101, layer=0, num_tokens=200)
    ids = [[(t + k) % 256 for k in range(8)] for t in range(200)]
    pair.ids(0, ids)
    tables = server_of([pair])
    groups = torch.arange(256, dtype=torch.int32).view(1, 256)
    word, draining = numbers(0), numbers(0, dtype=torch.int32)
    entry = numbers(0, dtype=torch.int32)
    requests = read_requests(tables, entry, word, draining, groups, max_tokens=200, top_k=8)
    assert requests.statuses_R.tolist() == [Status.OK]
    assert requests.ids_RTK.tolist() == [ids]
    # a bad id in the last row is seen too
    ids[199][7] = 256
    pair.ids(0, ids)
    requests = read_requests(tables, entry, word, draining, groups, max_tokens=200, top_k=8)
    assert requests.statuses_R.tolist() == [Status.UNKNOWN_EXPERT]
    assert requests.num_tokens_R.tolist() == [0]


def test_a_header_that_grew_since_it_was_admitted_finds_no_room() -> None:
    pair = Pair()
    pair.request(0, 0x101, layer=1, num_tokens=2)
    pair.ids(0, [[-1, -1], [-1, -1]])
    for admitted, status in ((2, Status.OK), (3, Status.OK), (1, Status.OVERLOADED)):
        _, requests = read(pair, [4, -1], admitted=[admitted, 0])
        assert requests.statuses_R.tolist() == [status, -1]
        assert requests.num_tokens_R.tolist() == [2 if status is Status.OK else 0, 0]
    # what is worse counts first
    _, requests = read(pair, [4], admitted=[1], since=NOW - 2000)
    assert requests.statuses_R.tolist() == [Status.EXPIRED]


def test_a_table_of_groups_in_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"groups_LE must be int32, got torch.int64; cast it"):
        read(Pair(), [4], groups=GROUPS.long())


def test_a_list_in_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ready_R must be int32, got torch.int64; cast it first"):
        read_requests(
            server_of([None]),
            numbers(0),
            numbers(0),
            numbers(0, dtype=torch.int32),
            GROUPS,
            max_tokens=T,
            top_k=K,
        )
