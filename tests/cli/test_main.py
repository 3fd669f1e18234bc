from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace

import pytest
from launched import ENVIRONMENT, ROOT

import torch_eaas
from torch_eaas.cli import main as cli
from torch_eaas.cli.verb import Verb
from torch_eaas.errors import ExpertUnavailable

HELP = """
import sys
from torch_eaas.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0
assert not {'torch', 'numpy', 'transformers', 'fastapi', 'httpx'} & set(sys.modules)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("verb", ["", "monitor", "server", "generate", "launch", "demo"])
def test_help_comes_in_less_than_a_second_and_without_torch(verb: str) -> None:
    for _ in range(3):
        began = time.monotonic()
        done = python("-c", HELP, *filter(None, [verb]), "--help")
        seconds = time.monotonic() - began
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"usage: torch-eaas {verb}".rstrip())
        if seconds < 1:
            return
    pytest.fail(f"--help took {seconds:.2f} s, three times more than 1 s")


def test_the_module_is_the_command() -> None:
    done = python("-m", "torch_eaas", "--version")
    assert (done.returncode, done.stdout) == (0, f"torch-eaas {torch_eaas.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "VERB"),
        ("fly", "invalid choice: 'fly'"),
        ("monitor --port 65536", "must be an integer from 0 to 65535, got '65536'"),
        ("monitor --lease 0", "must be a number above 0, got '0'"),
        ("server", "CHECKPOINT"),
        ("server X --share 3/3", "INDEX from 0 to COUNT - 1, got '3/3'"),
        ("server X --share 1", "must be INDEX/COUNT"),
        ("server X --share 0/2 --copies 3", "number of servers (2), got 3"),
        ("server X --share 0/2 --experts 1", "not allowed with"),
        ("server X --experts 4-2", "numbers and ranges like 0-7,12, got '4-2'"),
        ("server X --experts 1 --copies 2", "--copies goes with --share"),
        ("server X --standby --share 0/2", "not allowed with"),
        ("server X --standby", "--standby and --room need --monitor"),
        ("server X --room 8", "--standby and --room need --monitor"),
        ("server X --standby --monitor http://m --copies 2", "not with --standby"),
        ("server X --storage int4", "invalid choice: 'int4'"),
        ("server X --transport loopback", "invalid choice: 'loopback'"),
        ("server X --address tcp://0.0.0.0:7000", "between hosts it takes NvshmemTransport"),
        ("server X --address tls://h:7000", "--address tls://h:7000: transports that are picked"),
        ("server X --threads 0", "must be an integer of at least 1, got '0'"),
        ("generate X --prompt A --max-new-tokens 1", "--monitor --servers is required"),
        ("generate X --monitor U --max-new-tokens 1", "--prompt"),
        ("generate X --monitor U --prompt A --max-new-tokens x", "at least 1, got 'x'"),
        ("launch", "FILE"),
        ("demo --copies 4", "--copies must be at most --servers (3), got 4"),
        ("demo --copies 1", "add --no-kill"),
        ("demo --temperature nan", "must be a number above 0, got 'nan'"),
    ],
)
def test_wrong_usage_ends_with_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


BROKEN = """
import sys
from torch_eaas.cli import main as cli
from torch_eaas.cli.verb import Verb
def work(args, parser):
    while True:
        print("x" * 10000, flush=True)
verb = Verb(name="try", summary="", description="", add_arguments=lambda p: None, run=work)
cli.VERBS = (verb,)
sys.exit(cli.main(["try"]))
"""


def test_a_reader_that_leaves_is_no_reason_for_a_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", BROKEN],
            stdout=out,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            cwd=ROOT,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")


class TestVerbs:
    @pytest.fixture(autouse=True)
    def _restore(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli, "_log_to_stderr", lambda level: None)

    def run(self, error: BaseException | None, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
        def work(args: Namespace, parser: ArgumentParser) -> int:
            if error is not None:
                raise error
            return 0

        verb = Verb(
            name="try", summary="", description="", add_arguments=lambda parser: None, run=work
        )
        monkeypatch.setattr(cli, "VERBS", (verb,))
        return cli.main(["try", *more])

    def test_success_is_0(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.run(None, monkeypatch) == 0

    def test_an_error_of_ours_is_1_and_one_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(ExpertUnavailable(3, 7, ()), monkeypatch) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err == ("torch-eaas try: layer 3, expert 7 is unavailable (no server holds it)\n")

    def test_debug_shows_where_it_was_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ExpertUnavailable):
            self.run(ExpertUnavailable(3, 7, ()), monkeypatch, "--debug")

    def test_an_interrupt_is_1(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(KeyboardInterrupt(), monkeypatch) == 1
        assert capsys.readouterr().err == "torch-eaas try: interrupted\n"

    def test_an_error_of_anybody_else_is_not_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ZeroDivisionError):
            self.run(ZeroDivisionError(), monkeypatch)
