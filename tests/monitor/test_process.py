from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import torch_eaas

ROOT = Path(torch_eaas.__file__).parents[1]
SERVE = """
import sys
from torch_eaas.config import MonitorConfig
from torch_eaas.monitor.app import run
sys.exit(run(MonitorConfig()))
"""


def python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = python(SERVE)
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_ends_it_within_two_seconds_though_someone_listens(
    served: tuple[subprocess.Popen[str], dict[str, Any]], number: signal.Signals
) -> None:
    process, ready = served
    assert ready == {"ready": "monitor", "url": ready["url"], "pid": process.pid}
    with httpx.stream("GET", ready["url"] + "/events", trust_env=False, verify=False) as answer:
        assert next(answer.iter_lines())
        began = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert time.monotonic() - began < 2
    assert (process.returncode, out, err) == (0, "", "")


def test_a_port_that_is_taken_ends_it_with_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        process = python(SERVE.replace("MonitorConfig()", f"MonitorConfig(port={port})"))
        out, err = process.communicate(timeout=20)
    assert process.returncode != 0
    assert out == ""
    assert f"ConfigError: the monitor cannot listen on 127.0.0.1:{port}" in err


def test_the_monitor_never_imports_torch() -> None:
    modules = sorted(path.stem for path in (ROOT / "torch_eaas" / "monitor").glob("*.py"))
    imports = "\n".join(f"import torch_eaas.monitor.{name}" for name in modules)
    process = python(f"import sys\n{imports}\nsys.exit('torch' in sys.modules)")
    assert (process.communicate(timeout=30), process.returncode) == (("", ""), 0)


def test_an_agent_needs_no_web_server() -> None:
    process = python(
        "import sys, torch_eaas.monitor.agent\n"
        "sys.exit(bool({'fastapi', 'uvicorn', 'pydantic'} & set(sys.modules)))"
    )
    assert (process.communicate(timeout=30), process.returncode) == (("", ""), 0)
