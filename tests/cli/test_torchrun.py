"""The launch scripts: all clients in one torchrun launch, each server in a launch of its own."""

from __future__ import annotations

import os
import signal

import pytest
from launched import ROOT, SHAKESPEARE, Launched, children, eaas, free_port, is_gone, wait_for
from local import continuation

from torch_eaas.cli import main as cli

PROMPTS = ("ROMEO:\nBut soft, ", "JULIET:\nO ")
TOKENS = 16


def script(name: str, *options: str, **settings: str) -> Launched:
    return Launched(
        "bash", str(ROOT / "scripts" / name), *options, CHECKPOINT=str(SHAKESPEARE), **settings
    )


def clients(url: str, count: int) -> Launched:
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    options = [*prompts, f"--max-new-tokens={TOKENS}", "--wait=120"]
    return script("run_clients.sh", *options, NCLIENT=str(count), MONITOR=url)


def lines_of(prefix: str, output: bytes) -> str:
    lines = output.decode().splitlines(keepends=True)
    return "".join(line.removeprefix(prefix) for line in lines if line.startswith(prefix))


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("in_process")
def test_clients_and_servers_find_each_other_in_any_order_and_a_launch_dies_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        clients(url, 2) as first,
        script("run_servers.sh", NSERVER="2", COPIES="2", MONITOR=url) as servers,
    ):
        wait_for(lambda: servers.out.count(b'"ready"') == 2 or servers.process.poll() is not None)
        with eaas("monitor", f"--port={port}"):
            assert first.end() == 0, (first.err, servers.err)
            for rank, prompt in enumerate(PROMPTS):
                text = lines_of(f"[client-{rank}] ", first.out)
                assert text == continuation(prompt, TOKENS) + "\n"

            assert len(children(servers.pid)) == 2, (servers.out, servers.err)
            doomed, other = children(servers.pid)
            (server,), (survivor,) = children(doomed), children(other)
            os.kill(doomed, signal.SIGKILL)
            wait_for(lambda: is_gone(doomed) and is_gone(server), timeout=2)
            assert not is_gone(survivor)

            # now the servers are there before the client
            arguments = ["generate", str(SHAKESPEARE), f"--monitor={url}"]
            arguments += [f"--prompt={PROMPTS[0]}", f"--max-new-tokens={TOKENS}"]
            assert cli.main(arguments) == 0, servers.err
            assert capsys.readouterr().out == continuation(PROMPTS[0], TOKENS) + "\n"
            servers.send(signal.SIGTERM)
            # one launch did not end well
            assert servers.end() == 1
            assert is_gone(survivor)
            assert is_gone(other)


def test_a_script_says_what_is_missing() -> None:
    with script("run_servers.sh") as servers, script("run_clients.sh") as some:
        for launched in (servers, some):
            assert launched.end() != 0
            assert "set MONITOR to the URL of the monitor" in launched.err
