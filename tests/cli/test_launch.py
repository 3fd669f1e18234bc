"""``torch-eaas launch`` with real monitors, servers and clients."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from launched import ROOT, SHAKESPEARE, eaas, is_gone, wait_for
from local import continuation

from torch_eaas.cli import main as cli

EXAMPLE = ROOT / "scripts" / "local_cluster.toml"


@pytest.mark.timeout(240)
def test_the_example_writes_what_local_experts_write() -> None:
    with eaas("launch", str(EXAMPLE)) as launch:
        assert launch.end() == 0, launch.err
        ready, text = launch.out.decode().split("\n", 1)
        assert list(json.loads(ready)["pids"]) == ["monitor", "server-0", "server-1", "hot"]
        assert text == continuation("ROMEO:\nBut soft, ", 32) + "\n"
        assert "[romeo] romeo: 32 tokens at " in launch.err


def test_a_monitor_and_a_server_that_are_killed_come_back_and_are_known(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    # one holder of each expert: without the killed server the cluster is not ready
    file.write_text(f"checkpoint = {str(SHAKESPEARE)!r}\n[[server]]\ncount = 2\n")
    with eaas("launch", str(file)) as launch:
        ready = launch.ready()
        for name in ("server-1", "monitor"):
            os.kill(ready["pids"][name], signal.SIGKILL)
        wait_for(lambda: launch.err.count("is started, pid") == 5)
        wait_for(lambda: all_are_held(ready["url"]))
        pids = [int(line.split()[-1]) for line in launch.err.splitlines() if "is started" in line]
        assert sum(map(is_gone, pids)) == 2
        launch.send(signal.SIGTERM)
        assert launch.end() == 0, launch.err
        assert all(map(is_gone, pids))


def test_a_checkpoint_that_no_server_can_read_is_a_failed_start(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("checkpoint = '.'\n[[server]]\n")
    with eaas("launch", str(tmp_path / "cluster.toml")) as launch:
        assert launch.end() == 1
        message = launch.err.splitlines()
        [at] = [i for i, line in enumerate(message) if line.startswith("torch-eaas launch: ")]
        assert message[at] == (
            "torch-eaas launch: server ended with exit code 1 before it was ready; "
            "the end of its stderr:"
        )
        assert message[at + 1].startswith("  torch-eaas server: ")
        assert launch.out == b""


def test_a_dry_run_prints_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--dry-run", str(EXAMPLE)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    commands = {line["name"]: " ".join(line["command"][3:]) for line in lines}
    assert commands["monitor"] == "monitor --host=127.0.0.1 --port=0"
    assert "--monitor={monitor} --share=1/2 --copies=2 --name=server-1" in commands["server-1"]
    assert "--experts=0,1,2,3,9 --name=hot" in commands["hot"]
    assert commands["romeo"].endswith("--max-new-tokens=32 --name=romeo")
    assert str(SHAKESPEARE) in commands["romeo"]


def all_are_held(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
