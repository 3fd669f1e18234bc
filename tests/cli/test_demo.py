from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import Launched, eaas
from local import continuation

from torch_eaas.cli.report import recompute

TOKENS = 24
PROMPT = "First Citizen:\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Launched, dict[str, Any]]]:
    path: Path = tmp_path_factory.mktemp("demo") / "demo.json"
    options = ["--greedy", f"--tokens={TOKENS}", f"--prompt={PROMPT}", f"--json={path}"]
    with eaas("demo", *options) as process:
        assert process.end() == 0, (process.out, process.err)
        yield process, json.loads(path.read_text())


def test_the_text_is_that_of_local_experts_though_a_server_is_killed(
    demo: tuple[Launched, dict[str, Any]],
) -> None:
    process, _ = demo
    told = "-- server-1 is killed (SIGKILL) after 12 tokens --\n"
    before, _, after = process.out.decode().partition(told)
    head = before[before.index(PROMPT) :]
    expected = continuation(PROMPT, TOKENS)
    tail = after[: len(expected.encode()) - len(PROMPT) - 12]
    # the line about the kill stands alone: it may have ended a line of the text
    assert (head + tail == expected) or (head.removesuffix("\n") + tail == expected)
    assert process.err == ""


def test_the_report_says_what_was_promised_and_can_be_recomputed(
    demo: tuple[Launched, dict[str, Any]],
) -> None:
    _, report = demo
    checks = {check["name"]: (check["value"], check["target"]) for check in report["checks"]}
    assert checks["tokens_equal"] == (1, "== 1")
    assert checks["bytes_read_ratio"] == (1, "<= 1.02")
    assert all(check.ok for check in recompute(report))
    assert {"commit", "machine", "versions"} < report.keys()


def test_the_report_tells_where_the_time_went_before_and_after_the_kill(
    demo: tuple[Launched, dict[str, Any]],
) -> None:
    _, report = demo
    rows = {tuple(row["key"]): row for row in report["rows"]}
    local, before, after = (rows["phase", name] for name in ("local", "remote", "remote, one dead"))
    assert (local["tokens"], before["tokens"], after["tokens"]) == (23, 11, 12)
    for phase in (local, before, after):
        parts = ("experts_ms", "waiting_ms", "bookkeeping_ms", "rest_ms")
        assert sum(phase[part] for part in parts) == pytest.approx(phase["total_ms"], abs=0.001)
        assert all(phase[part] >= 0 for part in parts)
    assert before["bookkeeping_ms"] > 0
    assert (rows["kill",]["server"], rows["kill",]["after_token"]) == ("server-1", 12)
    assert [rows["server", f"server-{i}"]["killed"] for i in range(3)] == [0, 1, 0]
    assert len(rows["tokens",]["remote"]) == TOKENS


def test_a_demo_whose_checkpoint_is_missing_fails(tmp_path: Path) -> None:
    with eaas("demo", f"--checkpoint={tmp_path / 'none'}") as process:
        assert process.end() == 1
        assert process.err == (
            f"torch-eaas demo: {tmp_path / 'none'}: is no directory; a checkpoint is one\n"
        )
