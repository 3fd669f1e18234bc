"""Nothing that was started outlives who started it, even if that one is killed."""

from __future__ import annotations

import os
import sys

import pytest
from launched import Launched, children, eaas, is_gone, wait_for

PARENT = """
import time
from torch_eaas.cli.children import Child
child = Child("the monitor", ["monitor"])
{wait}
print(child.pid, flush=True)
time.sleep(600)
"""


def gone_within_two_seconds(pids: list[int]) -> None:
    wait_for(lambda: all(map(is_gone, pids)), timeout=2)


@pytest.mark.parametrize(
    "wait",
    ["from datetime import timedelta; child.ready(timedelta(seconds=60))", ""],
    ids=["serving", "starting"],
)
def test_a_child_dies_with_its_parent(wait: str) -> None:
    with Launched(sys.executable, "-c", PARENT.format(wait=wait)) as parent:
        child = int(parent.until("\n"))
        assert not is_gone(child)
        parent.process.kill()
        gone_within_two_seconds([child])


def test_the_demo_dies_with_everything_that_it_started() -> None:
    with eaas("demo") as demo:
        wait_for(lambda: len(children(demo.pid)) == 4)
        started = children(demo.pid)
        demo.process.kill()
        gone_within_two_seconds(started)


def test_a_command_dies_with_a_launch_script() -> None:
    shell = (
        f"{sys.executable} -m torch_eaas.cli.parent $$ sleep 600 & "
        f"while ! grep -q sleep /proc/$!/comm; do sleep 0.05; done; echo $!; wait"
    )
    with Launched("bash", "-c", shell) as script:
        child = int(script.until("\n"))
        script.process.kill()
        gone_within_two_seconds([child])


def test_a_child_whose_parent_has_ended_already_does_not_start() -> None:
    # this test's parent is not the process's
    with eaas("--parent", str(os.getppid()), "monitor") as late:
        assert late.end() == 1
        assert late.err == f"the parent {os.getppid()} has ended\n"
        assert late.out == b""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("0", "true"), 0, ""),
        (("0", "false"), 1, ""),
        (("0",), 2, "usage: "),
        (("x", "true"), 2, "usage: "),
        (("0", "no-such-command"), 1, "no-such-command: No such file or directory"),
    ],
    ids=["succeeds", "fails", "no command", "no pid", "unknown command"],
)
def test_the_exit_code_is_the_commands(arguments: tuple[str, ...], code: int, message: str) -> None:
    with Launched(sys.executable, "-m", "torch_eaas.cli.parent", *arguments) as command:
        assert command.end() == code
        assert command.err.startswith(message)
