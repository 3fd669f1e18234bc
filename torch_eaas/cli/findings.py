"""What a demo found, as tables for people and as a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_eaas.cli.phases import Phase
from torch_eaas.cli.report import Report

MAX_READ_RATIO = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A server's planned end."""

    server: str
    """Its name."""

    after: int
    """The last token before it."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """The figures of one demo."""

    settings: Mapping[str, str | int]
    """How it was run."""

    servers: Mapping[str, Mapping[str, Any]]
    """The servers' ready lines by name."""

    remote: list[int] = field(default_factory=list)
    """The tokens with experts of the servers."""

    local: list[int] = field(default_factory=list)
    """The tokens with experts of this process."""

    phases: list[Phase] = field(default_factory=list)
    """Local, remote, and remote after the kill, as far as they took place."""

    kill: Kill | None = None
    """Which server was killed, if one was."""

    @property
    def num_equal(self) -> int:
        """How many tokens are equal, up to the first that is not."""
        pairs = list(zip(self.local, self.remote, strict=False))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))

    def text(self) -> str:
        """Return the tables."""
        return "\n".join(["", *self._server_lines(), "", *self._phase_lines(), "", self._verdict()])

    def report(self) -> Report:
        """Return rows and checks."""
        report = Report(name="demo")
        report.add_row("settings", **self.settings)
        for name, told in self.servers.items():
            report.add_row("server", name, **_server_figures(told), killed=int(self._died(name)))
        for phase in self.phases:
            report.add_row("phase", phase.name, **phase.to_json())
        if self.kill is not None:
            report.add_row("kill", server=self.kill.server, after_token=self.kill.after)
        total = max(len(self.local), len(self.remote))
        report.add_row(
            "tokens", total=total, equal=self.num_equal, local=self.local, remote=self.remote
        )
        report.add_check("tokens_equal", "rows['tokens'].equal / rows['tokens'].total", "== 1")
        report.add_check("bytes_read_ratio", _worst_ratio(self.servers), f"<= {MAX_READ_RATIO}")
        return report

    def _died(self, name: str) -> bool:
        return self.kill is not None and self.kill.server == name

    def _server_lines(self) -> list[str]:
        rows = [["server", "experts of each layer", "bytes read", "bytes held", "ratio", ""]]
        for name, told in self.servers.items():
            figures = _server_figures(told)
            ratio = (figures["bytes_read"] + figures["header_bytes"]) / (
                figures["bytes_held"] + figures["header_bytes"]
            )
            rows.append(
                [
                    name,
                    _ranges(figures["experts"]),
                    f"{figures['bytes_read']:,}",
                    f"{figures['bytes_held']:,}",
                    f"{ratio:.4f}",
                    "killed" if self._died(name) else "",
                ]
            )
        return _table(rows)

    def _phase_lines(self) -> list[str]:
        head = ["", *(phase.name for phase in self.phases)]
        rows = [head, ["tokens/s", *(f"{phase.tokens_per_s:.1f}" for phase in self.phases)]]
        figures = {
            "ms a token": [phase.total_ms for phase in self.phases],
            "  experts": [phase.experts_ms for phase in self.phases],
            "  waiting beyond them": [phase.waiting_ms for phase in self.phases],
            "  bookkeeping": [phase.bookkeeping_ms for phase in self.phases],
            "  the rest": [phase.rest_ms for phase in self.phases],
            "median gap, ms": [phase.median_ms for phase in self.phases],
            "longest gap, ms": [phase.longest_ms for phase in self.phases],
        }
        for label, values in figures.items():
            rows.append([label, *(f"{value:.2f}" for value in values)])
            if len(values) > 1:
                rows[-1].insert(3, f"{values[1] - values[0]:+.2f}")
        if len(self.phases) > 1:
            head.insert(3, "difference")
            rows[1].insert(3, "")
        return _table(rows)

    def _verdict(self) -> str:
        total = max(len(self.local), len(self.remote))
        same = "yes" if self.num_equal == total else "NO"
        lines = [f"tokens equal to those with local experts: {same} ({self.num_equal} of {total})"]
        if self.kill is not None and len(self.phases) > 2:
            after = self.phases[2]
            lines.insert(
                0,
                f"pause at the death of {self.kill.server}: {after.longest_ms:.1f} ms between two "
                f"tokens, {after.median_ms:.1f} ms is usual; requests asked again of another "
                f"holder: {after.resends + after.hedges}",
            )
        return "\n".join(lines) + "\n"


def _server_figures(told: Mapping[str, Any]) -> dict[str, Any]:
    # a share is the same in every layer
    experts: Mapping[str, Sequence[int]] = told["experts"]
    return {
        "bytes_read": told["bytes_read"],
        "bytes_held": told["bytes_held"],
        "header_bytes": told["header_bytes"],
        "layers": [int(layer) for layer in experts],
        "experts": next(iter(experts.values()), []),
    }


def _worst_ratio(servers: Mapping[str, object]) -> str:
    """Return the formula: bytes read over bytes of the server's own tensors, headers in both."""
    ratios = []
    for name in servers:
        row = f"rows['server','{name}']"
        ratios.append(
            f"({row}.bytes_read + {row}.header_bytes) / ({row}.bytes_held + {row}.header_bytes)"
        )
    return ratios[0] if len(ratios) == 1 else f"max({', '.join(ratios)})"


def _ranges(ids: Sequence[int]) -> str:
    """Write ascending numbers as ``--experts`` takes them.

    Example:
        ``[0, 1, 2, 5, 7, 8]`` gives ``"0-2,5,7,8"``.
    """
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    parts = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs]
    return ",".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
