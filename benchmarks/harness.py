"""What all benchmarks share: the command line, tests first, pinning, and medians of rounds."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch_eaas.cli.report import Report, median, percentile

ROOT = Path(__file__).parents[1]


class CannotMeasure(Exception):
    """This machine lacks what a benchmark measures; the text says what."""


class WrongResult(Exception):
    """What was to be measured gives wrong results; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long to measure."""

    rounds: int = 9
    """Rounds; each measures every variant, and a figure is the median over the rounds."""

    quick: bool = False
    """Show only that it runs: few repetitions, small sizes."""

    forwards: int = 10_000
    """Forwards under faults, where that is what is measured."""

    kills: int = 1000
    """Clients to kill, likewise."""

    schedule: Path | None = None
    """Which process fails when; None: a random schedule."""

    def count(self, usual: int) -> int:
        """Return how often to repeat what is usually repeated ``usual`` times."""
        return max(2, usual // 50) if self.quick else usual


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One benchmark: where it is, and which tests must pass before it says anything."""

    name: str
    """How it is called on the command line."""

    summary: str
    """What it measures, in half a sentence."""

    module: str
    """The module whose ``run(options)`` returns a Report."""

    tests: tuple[str, ...]
    """Tests of what it measures: paths and patterns, from the repository's root. None: ``run``
    itself checks, and raises WrongResult."""

    def run(self, options: Options) -> Report:
        """Measure."""
        report = importlib.import_module(self.module).run(options)
        assert isinstance(report, Report)
        return report


def main(argv: Sequence[str], cases: Sequence[Case]) -> int:
    """Test, measure, print and write; return the exit code.

    It is 0, 1 where tests are red or results wrong, 2 for usage, 3 where this machine lacks what
    is measured.
    """
    by_name = {case.name: case for case in cases}
    parser = _parser(cases)
    given = parser.parse_args(argv)
    for option in ("rounds", "forwards", "kills"):
        if getattr(given, option) < 1:
            parser.error(f"--{option} must be at least 1, got {getattr(given, option)}")
    case = by_name[given.name]
    if case.tests and not given.skip_tests:
        failure = run_tests(case.tests)
        if failure:
            print(failure)
            return 1
    options = Options(
        rounds=1 if given.quick else given.rounds,
        quick=given.quick,
        forwards=given.forwards,
        kills=given.kills,
        schedule=given.schedule,
    )
    try:
        report = case.run(options)
    except (CannotMeasure, WrongResult) as error:
        print(error, file=sys.stderr)
        return 3 if isinstance(error, CannotMeasure) else 1
    print(report.text())
    if given.json is not None:
        report.write(given.json)
    return 0


def run_tests(patterns: Sequence[str]) -> str:
    """Run tests in a process of their own; return what they print if they fail, else nothing."""
    paths = sorted({str(path) for pattern in patterns for path in ROOT.glob(pattern)})
    if not paths:
        return f"none of {', '.join(patterns)} exists; --skip-tests measures without tests"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout or f"pytest ended with {done.returncode}"


def cores() -> tuple[int, int]:
    """Return a core for the client and one for the servers; the same one if there is only one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


@contextmanager
def pinned(*allowed: int) -> Iterator[None]:
    """Run on these cores only, threads that begin meanwhile too."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def figures(rounds_s: Sequence[Sequence[float]]) -> dict[str, float | int]:
    """Return what a row says of times in seconds: medians over the rounds, and their spread.

    Args:
        rounds_s: For each round the times it took.
    """
    middles = [median(times) for times in rounds_s]
    return {
        "p50_us": _us(median(middles)),
        "p99_us": _us(median([percentile(times, 99) for times in rounds_s])),
        "p50_min_us": _us(min(middles)),
        "p50_max_us": _us(max(middles)),
        "calls": sum(len(times) for times in rounds_s),
    }


def _parser(cases: Sequence[Case]) -> argparse.ArgumentParser:
    listed = "\n".join(f"  {case.name:<12}{case.summary}" for case in cases)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Measure, after the tests of what is measured have passed.\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=[case.name for case in cases], help="which benchmark")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="show only that it runs")
    parser.add_argument("--skip-tests", action="store_true", help="measure without testing first")
    parser.add_argument(
        "--forwards", type=int, default=10_000, help="failover: forwards under faults (%(default)s)"
    )
    parser.add_argument(
        "--kills", type=int, default=1000, help="failover: clients to kill (%(default)s)"
    )
    parser.add_argument(
        "--schedule", type=Path, metavar="FILE", help="failover: who fails when, as JSON (random)"
    )
    return parser


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)
