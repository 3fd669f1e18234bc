"""What a measurement found: rows of figures, and checks that anyone can compute from them again.

Benchmarks and the demo write this one form of JSON::

    {"name", "commit", "machine", "versions",
     "rows": [{"key": ["shm", "14k"], "p50_us": 9.5}, ...],
     "checks": [{"name", "value", "target": "<= 25", "ok",
                 "formula": "rows['shm','14k'].p50_us / rows['floor','14k'].p50_us"}, ...]}

A formula is arithmetic (numbers, ``+ - * /``, parentheses) over fields of rows, each named by its
row's key: ``rows['shm','14k'].p50_us``. It may call ``min`` and ``max`` of several numbers, and
``median(field)`` and ``percentile(field, q)`` of a field that is a list; both take the value
between two ranks by a straight line. A target is a comparison and a number.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch_eaas
from torch_eaas.errors import ConfigError

Row = dict[str, Any]
Rows = Mapping[tuple[str, ...], Mapping[str, Any]]

PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "pyzmq")
"""Packages whose versions a report names, where they are installed."""

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One figure that was promised, and what became of it."""

    name: str
    """How the promise is called."""

    value: float
    """What the formula gives."""

    target: str
    """What was promised: ``<=``, ``>=`` or ``==``, and a number."""

    ok: bool
    """Whether the value meets the target."""

    formula: str
    """How the value follows from the rows."""


@dataclass(slots=True, kw_only=True)
class Report:
    """The rows and checks of one run.

    Example::

        report = Report(name="transport")
        report.add_row("shm", "14k", p50_us=9.5)
        report.add_check("shm_14k_us", "rows['shm','14k'].p50_us", "<= 20")
        report.write(Path("transport.json"))
    """

    name: str
    """What was measured."""

    rows: list[Row] = field(default_factory=list)
    """The figures; ``key`` names a row, every other field is a number, a text or a list."""

    checks: list[Check] = field(default_factory=list)
    """What was promised of them."""

    def add_row(self, *key: str, **figures: Any) -> None:
        """Add a row; ConfigError if its key is taken."""
        if list(key) in [row["key"] for row in self.rows]:
            raise ConfigError(f"report {self.name} has a row {key} already")
        self.rows.append({"key": list(key), **figures})

    def add_check(self, name: str, formula: str, target: str) -> None:
        """Add a check; its value is what the formula gives of the rows that are there.

        Raises:
            ConfigError: The formula or the target is not understood, or names no row.
        """
        value = evaluate(formula, self.rows)
        ok = meets(value, target)
        self.checks.append(Check(name=name, value=value, target=target, ok=ok, formula=formula))

    def has_rows(self, *keys: tuple[str, ...]) -> bool:
        """Return whether all these rows are there: a quick run leaves some out."""
        present = {tuple(row["key"]) for row in self.rows}
        return all(key in present for key in keys)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, with the machine and the versions of now."""
        return {
            "name": self.name,
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "rows": self.rows,
            "checks": [asdict(check) for check in self.checks],
        }

    def write(self, path: Path) -> None:
        """Write the JSON object to a file."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def text(self) -> str:
        """Return the rows and the checks as tables for people; lists are left out."""
        lines: list[str] = []
        for rows in _groups(self.rows):
            lines += ["", *_table(rows)]
        if self.checks:
            lines += ["", f"{'check':<34}{'value':>14}{'target':>14}"]
        for check in self.checks:
            verdict = "ok" if check.ok else "MISSED"
            value = _shown(check.value)
            lines.append(f"{check.name:<34}{value:>14}{check.target:>14}  {verdict}")
        return "\n".join(lines)


def evaluate(formula: str, rows: Sequence[Row]) -> float:
    """Return what a formula gives of rows.

    Raises:
        ConfigError: It is not in the language that the module describes, or names no row.
    """
    table = {tuple(row["key"]): {n: v for n, v in row.items() if n != "key"} for row in rows}
    try:
        value = _value(ast.parse(formula, mode="eval").body, table)
        return float(value)
    except (SyntaxError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"cannot compute {formula!r}: {error!r}") from error


def meets(value: float, target: str) -> bool:
    """Return whether a value meets a target such as ``<= 25``; ConfigError if it is none."""
    parts = target.split()
    if len(parts) != 2 or parts[0] not in _COMPARISONS:
        raise ConfigError(f"a target is one of <= >= == and a number, got {target!r}")
    return _COMPARISONS[parts[0]](value, float(parts[1]))


def recompute(report: Mapping[str, Any]) -> list[Check]:
    """Return a written report's checks as its rows give them, whatever it claims."""
    checks = []
    for told in report["checks"]:
        value = evaluate(told["formula"], report["rows"])
        ok = meets(value, told["target"])
        checks.append(Check(**{**told, "value": value, "ok": ok}))
    return checks


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile, on a straight line between the two nearest ranks.

    Example:
        ``percentile([0, 10], 25)`` is 2.5.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no percentile of nothing")
    rank = (len(ordered) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two middle ones."""
    return percentile(values, 50)


_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "median": median,
    "percentile": percentile,
}


def commit() -> str:
    """Return the commit of this source tree, ``-dirty`` where files differ, or ``unknown``."""
    folder = Path(torch_eaas.__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always"]
    command += ["--exclude=*", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Return what the figures were taken on."""
    cpu = _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    memory_kib = (_first("/proc/meminfo", "MemTotal") or "0").split()[0]
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory_kib) / 2**20, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Return the versions of this package and of those that the figures depend on."""
    found = {"torch_eaas": torch_eaas.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _value(node: ast.expr, rows: Rows) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, rows)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left, rows), _value(right, rows))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(argument, rows) for argument in args))
        case ast.Attribute(value=ast.Subscript(value=ast.Name(id="rows"), slice=key), attr=name):
            parts = ast.literal_eval(key)
            return rows[parts if isinstance(parts, tuple) else (parts,)][name]
    raise ValueError(f"{ast.unparse(node)} is not part of a formula")


def _first(path: str, name: str) -> str | None:
    """Return what follows ``name :`` in a file of /proc."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Split rows into tables: those in a row with the same fields, or the same first word."""
    groups: list[list[Row]] = []
    for row in rows:
        last = groups[-1][-1] if groups else None
        if last is not None and (list(last) == list(row) or last["key"][0] == row["key"][0]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a header and a line for each row; rows may lack each other's fields."""
    shown = [
        {name: _shown(value) for name, value in row.items() if not isinstance(value, list)}
        for row in rows
    ]
    names = list(dict.fromkeys(name for cells in shown for name in cells))
    widths = {name: max(14, len(name) + 2) for name in names}
    yield " " * 34 + "".join(f"{name:>{widths[name]}}" for name in names)
    for row, cells in zip(rows, shown, strict=True):
        line = "".join(f"{cells.get(name, ''):>{widths[name]}}" for name in names)
        yield f"{' '.join(row['key']):<34}{line}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
