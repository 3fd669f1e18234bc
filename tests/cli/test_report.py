from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torch_eaas.cli.report import Report, evaluate, meets, percentile, recompute
from torch_eaas.errors import ConfigError

ROWS: list[dict[str, Any]] = [
    {"key": ["shm", "14k"], "p50_us": 12.0, "name": "text"},
    {"key": ["floor", "14k"], "p50_us": 0.5},
    {"key": ["wait"], "extra_us": [4.0, 1.0, 3.0, 2.0]},
]


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("rows['shm','14k'].p50_us / rows['floor', '14k'].p50_us", 24.0),
        ("rows['shm','14k'].p50_us - 2 * (rows['floor','14k'].p50_us + 1)", 9.0),
        ("-rows['shm','14k'].p50_us", -12.0),
        ("max(rows['shm','14k'].p50_us, rows['floor','14k'].p50_us, 3)", 12.0),
        ("min(rows['shm','14k'].p50_us, rows['floor','14k'].p50_us)", 0.5),
        ("median(rows['wait'].extra_us)", 2.5),
        ("percentile(rows['wait'].extra_us, 100)", 4.0),
        ("percentile(rows['wait'].extra_us, 25) + 1", 2.75),
    ],
)
def test_a_formula_is_arithmetic_over_fields_of_rows(formula: str, value: float) -> None:
    assert evaluate(formula, ROWS) == value


@pytest.mark.parametrize(
    "formula",
    [
        "rows['shm'].p50_us",
        "rows['shm','14k'].p99_us",
        "rows['shm','14k'].name",
        "rows['shm','14k'].p50_us / 0",
        "rows['wait'].extra_us",
        "rows['shm','14k'].p50_us.real",
        "__import__('os').getpid()",
        "max(*rows['wait'].extra_us)",
        "'text'",
        "True",
        "1 +",
        "",
    ],
)
def test_anything_else_is_refused(formula: str) -> None:
    with pytest.raises(ConfigError, match="cannot compute"):
        evaluate(formula, ROWS)


@pytest.mark.parametrize(
    ("value", "target", "ok"),
    [
        (8, ">= 8", True),
        (7.9, ">= 8", False),
        (1.5, "<= 1.5", True),
        (1.6, "<= 1.5", False),
        (1, "== 1", True),
        (0, "== 1", False),
    ],
)
def test_a_target_is_a_comparison_and_a_number(value: float, target: str, ok: bool) -> None:
    assert meets(value, target) is ok


@pytest.mark.parametrize("target", ["8", "> 8", "about 8", "<= "])
def test_another_target_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="a target is one of"):
        meets(1, target)


@pytest.mark.parametrize("q", [0, 1, 50, 99, 100])
@pytest.mark.parametrize("num_values", [1, 2, 63])
def test_percentile_is_numpys(q: float, num_values: int) -> None:
    values = np.random.default_rng(0).permutation(num_values).astype(float).tolist()
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)))


def test_no_row_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


def test_the_file_has_the_one_form_and_recomputes(tmp_path: Path) -> None:
    report = Report(name="transport")
    report.add_row("shm", "14k", p50_us=12.0)
    report.add_row("floor", "14k", p50_us=0.5)
    report.add_check(
        "shm_14k_vs_floor", "rows['shm','14k'].p50_us / rows['floor','14k'].p50_us", "<= 20"
    )
    report.write(tmp_path / "f.json")
    written = json.loads((tmp_path / "f.json").read_text())
    assert list(written) == ["name", "commit", "machine", "versions", "rows", "checks"]
    assert written["rows"][0] == {"key": ["shm", "14k"], "p50_us": 12.0}
    assert set(written["machine"]) == {"cpu", "cores", "memory_gib", "kernel", "python"}
    assert {"torch_eaas", "torch", "numpy"} <= set(written["versions"])
    (check,) = written["checks"]
    assert check == {
        "name": "shm_14k_vs_floor",
        "value": 24.0,
        "target": "<= 20",
        "ok": False,
        "formula": "rows['shm','14k'].p50_us / rows['floor','14k'].p50_us",
    }
    assert recompute(written) == report.checks
    # what a file claims counts for nothing
    check.update(value=1.0, ok=True)
    assert recompute(written) == report.checks


def test_a_key_names_one_row() -> None:
    report = Report(name="x")
    report.add_row("a", n=1)
    assert report.has_rows(("a",))
    assert not report.has_rows(("a",), ("b",))
    with pytest.raises(ConfigError, match="has a row"):
        report.add_row("a", n=2)


def test_the_text_shows_rows_with_different_fields_and_no_lists() -> None:
    report = Report(name="x")
    report.add_row("a", "one", p50_us=1.25, raw=[1, 2])
    report.add_row("a", "two", p50_us=12345.6, more="word")
    report.add_check("twice", "2 * rows['a','one'].p50_us", "<= 2")
    lines = [line.split() for line in report.text().splitlines()]
    assert lines == [
        [],
        ["p50_us", "more"],
        ["a", "one", "1.25"],
        ["a", "two", "12346", "word"],
        [],
        ["check", "value", "target"],
        ["twice", "2.5", "<=", "2", "MISSED"],
    ]


def test_it_needs_no_torch() -> None:
    code = "import sys, torch_eaas.cli.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
