from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_eaas.cli.findings import Findings, Kill
from torch_eaas.cli.phases import Mark, phase_of
from torch_eaas.cli.report import recompute


def told(read: int, held: int = 1000, header: int = 100) -> dict[str, Any]:
    return {
        "experts": {"1": [0, 1, 2, 5], "2": [0, 1, 2, 5]},
        "bytes_read": read,
        "bytes_held": held,
        "header_bytes": header,
    }


def findings(**changes: Any) -> Findings:
    ones = {"settings": {"tokens": 3}, "servers": {"server-0": told(1000)}}
    return Findings(**{**ones, "local": [1, 2, 3], "remote": [1, 2, 3], **changes})


def value(found: Findings, check: str) -> tuple[float, bool]:
    one = next(c for c in found.report().checks if c.name == check)
    return one.value, one.ok


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], (1.0, True)),
        ([1, 2, 3, 4], [1, 2, 9, 4], (0.5, False)),
        ([1, 2, 3, 4], [1, 2, 3], (0.75, False)),
        ([1], [2], (0.0, False)),
    ],
    ids=["equal", "differ", "shorter", "all differ"],
)
def test_tokens_are_equal_up_to_the_first_that_differs(
    local: list[int], remote: list[int], expected: tuple[float, bool]
) -> None:
    assert value(findings(local=local, remote=remote), "tokens_equal") == expected


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([1000], (1.0, True)),
        ([1000, 1022], (1122 / 1100, True)),
        ([1023, 1000], (1123 / 1100, False)),
    ],
    ids=str,
)
def test_the_server_that_read_most_decides(reads: list[int], expected: tuple[float, bool]) -> None:
    servers = {f"server-{i}": told(read) for i, read in enumerate(reads)}
    ratio, ok = value(findings(servers=servers), "bytes_read_ratio")
    assert (ratio, ok) == (pytest.approx(expected[0]), expected[1])


def test_checks_follow_from_the_rows(tmp_path: Path) -> None:
    report = findings(servers={"server-0": told(1000), "server-1": told(1010)}).report()
    assert recompute(report.to_json()) == report.checks
    report.write(tmp_path / "demo.json")
    assert '"name": "demo"' in (tmp_path / "demo.json").read_text()


def test_tables_show_who_was_killed_and_how_long_it_took() -> None:
    steps = [(0.0, 0, 0, 0), (0.01, 4000, 6000, 1000), (0.06, 8000, 48_000, 2000)]
    marks = [
        Mark(t, {"experts_us": e, "wait_us": w, "bookkeeping_us": b, "resends": int(t > 0.02)})
        for t, e, w, b in steps
    ]
    phases = [
        phase_of("local", [Mark(0.0, {}), Mark(0.008, {"experts_us": 5000})]),
        phase_of("remote", marks[:2]),
        phase_of("remote, one dead", marks[1:]),
    ]
    text = findings(
        phases=phases,
        servers={"server-0": told(1000), "server-1": told(1010)},
        kill=Kill(server="server-1", after=2),
    ).text()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "server-0 0-2,5 1,000 1,000 1.0000" in lines
    assert "server-1 0-2,5 1,010 1,000 1.0091 killed" in lines
    assert "tokens/s 125.0 100.0 20.0" in lines
    assert "ms a token 8.00 10.00 +2.00 50.00" in lines
    assert "experts 5.00 4.00 -1.00 4.00" in lines
    assert "waiting beyond them 0.00 2.00 +2.00 38.00" in lines
    assert "bookkeeping 0.00 1.00 +1.00 1.00" in lines
    assert "the rest 3.00 3.00 +0.00 7.00" in lines
    assert "pause at the death of server-1: 50.0 ms between two tokens" in text
    assert "tokens equal to those with local experts: yes (3 of 3)" in text
