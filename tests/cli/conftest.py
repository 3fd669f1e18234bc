from __future__ import annotations

import pytest

from torch_eaas.cli import main as cli


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command line run in this process, which has imported what it needs."""
    monkeypatch.setattr(cli, "_log_to_stderr", lambda level: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
