from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import timedelta

import pytest

from torch_eaas.cli import arguments


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (arguments.count, "1", 1),
        (arguments.seed, "0", 0),
        (arguments.port, "65535", 65535),
        (arguments.seconds, "0.25", timedelta(milliseconds=250)),
        (arguments.device, "cpu", "cpu"),
        (arguments.device, "cuda:3", "cuda:3"),
        (arguments.share, "0/1", (0, 1)),
        (arguments.share, "2/3", (2, 3)),
        (arguments.expert_ids, "7", (7,)),
        (arguments.expert_ids, "0-3,12", (0, 1, 2, 3, 12)),
        (arguments.expert_ids, "12, 0-3,3,2-2", (0, 1, 2, 3, 12)),
    ],
    ids=str,
)
def test_value_is_read(read: Callable[[str], object], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (arguments.count, "0", "integer of at least 1, got '0'"),
        (arguments.count, "-1", "integer of at least 1"),
        (arguments.count, "1.5", "integer of at least 1"),
        (arguments.count, "", "integer of at least 1"),
        (arguments.seed, "-1", "integer of at least 0"),
        (arguments.port, "-1", "integer from 0 to 65535"),
        (arguments.seconds, "inf", "number above 0"),
        (arguments.seconds, "soon", "number above 0"),
        (arguments.device, "gpu", "cpu, cuda or cuda:N, got 'gpu'"),
        (arguments.device, "cuda:", "cpu, cuda or cuda:N"),
        (arguments.device, "cpu:1", "cpu, cuda or cuda:N"),
        (arguments.share, "3/3", "INDEX/COUNT"),
        (arguments.share, "0/0", "INDEX/COUNT"),
        (arguments.share, "-1/3", "INDEX/COUNT"),
        (arguments.share, "1", "INDEX/COUNT"),
        (arguments.expert_ids, "", "numbers and ranges"),
        (arguments.expert_ids, "1,,2", "numbers and ranges"),
        (arguments.expert_ids, "5-3", "numbers and ranges"),
        (arguments.expert_ids, "-3", "numbers and ranges"),
        (arguments.expert_ids, "0-99999999", "numbers and ranges"),
    ],
    ids=str,
)
def test_wrong_value_is_refused(read: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        read(text)
