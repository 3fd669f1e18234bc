from __future__ import annotations

import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import (
    CannotMeasure,
    Case,
    Options,
    WrongResult,
    cores,
    figures,
    main,
    pinned,
)
from torch_eaas.cli.report import Report


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A benchmark that says how many rounds it was asked for, and whose test is in a folder."""

    def run(options: Options) -> Report:
        report = Report(name="fake")
        report.add_row("rounds", n=options.rounds, quick=int(options.quick))
        report.add_check("rounds", "rows['rounds'].n", "<= 1")
        return report

    module = types.ModuleType("fake_benchmark")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_benchmark", module)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    return Case(name="fake", summary="nothing", module="fake_benchmark", tests=("test_*.py",))


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        [],
        ["fake", "--rounds", "0"],
        ["fake", "--rounds", "x"],
        ["fake", "--forwards", "0"],
        ["fake", "--kills", "-1"],
        ["fake", "--fast"],
    ],
    ids=str,
)
def test_wrong_usage_exits_with_2(argv: list[str], case: Case) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv, [case])
    assert ended.value.code == 2


def test_green_tests_let_it_measure(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_green.py").write_text("def test_it(): pass\n")
    assert main(["fake", "--json", str(tmp_path / "f.json"), "--rounds", "3"], [case]) == 0
    assert json.loads((tmp_path / "f.json").read_text())["rows"] == [
        {"key": ["rounds"], "n": 3, "quick": 0}
    ]
    assert "MISSED" in capsys.readouterr().out


def test_red_tests_leave_nothing_but_the_failure(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_red.py").write_text("def test_it(): assert 'this' == 'that'\n")
    target = tmp_path / "f.json"
    assert main(["fake", "--json", str(target)], [case]) == 1
    out = capsys.readouterr().out
    assert "'this' == 'that'" in out
    assert "rounds" not in out
    assert not target.exists()


def test_without_any_test_it_does_not_measure(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fake"], [case]) == 1
    assert "--skip-tests" in capsys.readouterr().out
    assert main(["fake", "--skip-tests", "--quick", "--rounds", "5"], [case]) == 0


def test_figures_are_medians_of_rounds() -> None:
    rounds_s = [[1e-6, 2e-6, 3e-6], [5e-6], [4e-6, 4e-6]]
    assert figures(rounds_s) == {
        "p50_us": 4.0,
        "p99_us": 4.0,
        "p50_min_us": 2.0,
        "p50_max_us": 5.0,
        "calls": 6,
    }


def test_pinning_ends() -> None:
    before = os.sched_getaffinity(0)
    with pinned(cores()[0]):
        assert os.sched_getaffinity(0) == {cores()[0]}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("error", "code"), [(CannotMeasure, 3), (WrongResult, 1)])
def test_what_cannot_be_measured_or_is_wrong_says_why_and_writes_nothing(
    error: type[Exception],
    code: int,
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(options: Options) -> Report:
        raise error("there is no such thing here")

    monkeypatch.setattr(sys.modules["fake_benchmark"], "run", run)
    target = tmp_path / "f.json"
    assert main(["fake", "--skip-tests", "--json", str(target)], [case]) == code
    assert capsys.readouterr() == ("", "there is no such thing here\n")
    assert not target.exists()


def test_a_case_that_checks_itself_needs_no_tests(case: Case) -> None:
    assert main(["fake", "--quick"], [replace(case, tests=())]) == 0
