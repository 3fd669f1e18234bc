"""Host-driven ends in processes of their own, started and heard by a test."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ops.host_end import TIMEOUT_S

needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="shared_memory needs x86-64's store order"
)


@contextmanager
def host_end(role: str, argument: str | int) -> Iterator[subprocess.Popen[str]]:
    """Run a host-driven end; it ends with this block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ops.host_end", role, str(argument)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def told(process: subprocess.Popen[str]) -> Any:
    """Return what the process prints next."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())
