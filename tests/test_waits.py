"""Nothing waits for ever: every call that can block has a deadline, or a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "torch_eaas"

BLOCKS_WITHOUT_ARGUMENTS = {
    *("accept", "acquire", "communicate", "get", "join", "poll", "recv", "recv_bytes"),
    *("result", "select", "wait"),
}
"""Methods that wait for ever unless they are told how long."""

BLOCKS_WITHOUT_TIMEOUT = {"call", "check_call", "check_output", "run", "urlopen", "wait_for"}
"""Functions of subprocess, urllib, asyncio and Condition that take a timeout by name."""

HOMES = {"subprocess", "request", "asyncio", "urllib"}

SOCKET_WAITS = {"recvmsg", "recv_into", "recv_fds", "sendall", "sendmsg", "connect"}
"""Methods that wait as long as their socket's timeout says: its file must set one."""

REASONS = {
    ("cli/children.py", "select.poll()"): "makes a poll object, and waits for nothing",
    ("cli/supervisor.py", "select.poll()"): "makes a poll object, and waits for nothing",
    ("cli/supervised.py", "self._process.poll()"): "looks, and does not wait",
    ("cli/supervisor.py", "process.poll()"): "looks, and does not wait",
    ("comm/control_link.py", "select.poll()"): "makes a poll object, and waits for nothing",
    ("comm/control_endpoint.py", "self._door.listening.accept()"): "a thread; close shuts it down",
    ("monitor/app.py", "asyncio.run(server.serve([sock]))"): "the monitor itself: signals end it",
    ("monitor/app.py", "asyncio.run(self._server.serve([self._sock]))"): "a thread; close ends it",
    ("monitor/bell.py", "self._event.wait()"): "wait_for around it has the timeout",
}


def blocking_calls(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each call that may wait for ever."""
    sets_timeout = "settimeout" in source
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, owner = node.func.attr, node.func.value
        keywords = {keyword.arg for keyword in node.keywords}
        has_limit = bool(node.args) or bool(keywords & {"timeout", "blocking"})
        home = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if (
            (name in BLOCKS_WITHOUT_ARGUMENTS and not has_limit)
            or (
                name in BLOCKS_WITHOUT_TIMEOUT
                and home in HOMES
                and "timeout" not in keywords
                and len(node.args) < 2
            )
            or (name in SOCKET_WAITS and not sets_timeout)
        ):
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_every_wait_has_a_deadline_or_a_reason(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    for line, call in blocking_calls(path.read_text()):
        assert (name, call) in REASONS, f"{name}:{line}: {call} may wait for ever"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_nothing_reads_a_clock_that_somebody_may_set(path: Path) -> None:
    clocks = {"time", "time_ns", "now", "utcnow", "today"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            is_wall = node.value.id in ("time", "datetime", "date") and node.attr in clocks
            assert not is_wall, f"{path}:{node.lineno}: {ast.unparse(node)} may jump"


def test_no_reason_outlives_its_call() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), call)
        for path in PACKAGE.rglob("*.py")
        for _, call in blocking_calls(path.read_text())
    }
    assert set(REASONS) <= found, set(REASONS) - found


@pytest.mark.parametrize(
    "source",
    [
        "event.wait()",
        "thread.join()",
        "lock.acquire()",
        "queue.get()",
        "process.communicate()",
        "subprocess.run(['true'])",
        "urllib.request.urlopen(url)",
        "sock.sendall(data)",
        "future.result()",
    ],
)
def test_a_wait_without_a_deadline_is_seen(source: str) -> None:
    assert list(blocking_calls(source))


@pytest.mark.parametrize(
    "source",
    [
        "event.wait(1)",
        "thread.join(timeout=2)",
        "', '.join(names)",
        "lock.acquire(blocking=False)",
        "names.get(key)",
        "subprocess.run(['true'], timeout=3)",
        "sock.settimeout(1)\nsock.sendall(data)",
    ],
)
def test_a_wait_with_a_deadline_passes(source: str) -> None:
    assert not list(blocking_calls(source))
