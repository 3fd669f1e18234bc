from __future__ import annotations

import re
from datetime import timedelta

import pytest
from launched import is_gone, wait_for

from torch_eaas.cli.children import Child
from torch_eaas.errors import PeerGone, PeerTimeout, TransportError

PATIENCE = timedelta(seconds=60)


def test_a_child_tells_when_it_is_ready_and_ends_with_close() -> None:
    with Child("the monitor", ["monitor"]) as child:
        line = child.ready(PATIENCE)
        assert (line["ready"], line["pid"]) == ("monitor", child.pid)
        pid = child.pid
    assert is_gone(pid)
    child.close()


def test_a_child_that_ends_early_is_named_with_its_exit_code(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with (
        Child("server-7", ["server", "/no/such/folder", "--share", "7/8"]) as child,
        pytest.raises(PeerGone, match="server-7 ended with 1 before it was ready; see above"),
    ):
        child.ready(PATIENCE)
    assert re.fullmatch(
        "torch-eaas server: /no/such/folder: is no directory.*\n", capfd.readouterr().err
    )


def test_a_child_that_takes_too_long_is_named() -> None:
    with (
        Child("the monitor", ["monitor"]) as child,
        pytest.raises(PeerTimeout, match=r"the monitor was not ready in 0\.001 s"),
    ):
        child.ready(timedelta(milliseconds=1))


def test_what_is_no_ready_line_is_shown() -> None:
    with (
        Child("version", ["--version"]) as child,
        pytest.raises(TransportError, match="version: no ready line, but b'torch-eaas "),
    ):
        child.ready(PATIENCE)


def test_kill_does_not_wait() -> None:
    with Child("the monitor", ["monitor"]) as child:
        child.kill()
        wait_for(lambda: is_gone(child.pid))
