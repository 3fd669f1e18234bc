"""Monitor, servers and clients as processes, in the most awkward order: clients first."""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launched import SHAKESPEARE, Launched, eaas, free_port, wait_for
from local import continuation

from torch_eaas.cli import main as cli

PROMPTS = ("ROMEO:\nBut soft, ", "JULIET:\nO ")
TOKENS = 32
NUM_EXPERTS = 16


@dataclass
class Running:
    monitor: Launched
    servers: list[Launched]
    clients: list[Launched]
    url: str

    def generate(self, prompt: str, tokens: int, *more: str) -> Launched:
        return generate(self.url, prompt, tokens, *more)


def generate(url: str, prompt: str, tokens: int, *more: str) -> Launched:
    where = [] if "--servers" in more else [f"--monitor={url}"]
    options = [f"--prompt={prompt}", f"--max-new-tokens={tokens}"]
    return eaas("generate", str(SHAKESPEARE), *where, *options, *more)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Two clients, then three servers with two holders of each expert, then a monitor."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        clients = [stack.enter_context(generate(url, prompt, TOKENS)) for prompt in PROMPTS]
        servers = [
            stack.enter_context(
                eaas("server", str(SHAKESPEARE), f"--monitor={url}", f"--share={i}/3", "--copies=2")
            )
            for i in range(3)
        ]
        for server in servers:
            server.ready()
        monitor = stack.enter_context(eaas("monitor", f"--port={port}"))
        yield Running(monitor, servers, clients, url)


def test_two_clients_that_came_first_write_what_local_experts_write(running: Running) -> None:
    for client, prompt in zip(running.clients, PROMPTS, strict=True):
        assert client.end() == 0, client.err
        assert client.out.decode() == continuation(prompt, TOKENS) + "\n"
        assert f"client: {TOKENS} tokens at " in client.err


def test_each_server_reads_its_own_experts_and_nothing_else(running: Running) -> None:
    sizes = _tensor_sizes(SHAKESPEARE)
    for i, server in enumerate(running.servers):
        line = server.ready()
        own = [e for e in range(NUM_EXPERTS) if (i - e) % 3 < 2]
        assert line["experts"] == {str(layer): own for layer in (1, 2, 3, 4)}
        parts = [f".layers.{layer}.mlp.experts.{e}." for layer in (1, 2, 3, 4) for e in own]
        held = sum(size for name, size in sizes.items() if any(part in name for part in parts))
        assert (line["bytes_read"], line["bytes_held"]) == (held, held)
        assert (line["ready"], line["name"]) == ("server", f"server-{i}")
        assert line["pid"] == server.pid


@pytest.mark.usefixtures("in_process")
def test_without_a_monitor_a_client_is_told_the_servers(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    addresses = [server.ready()["address"] for server in running.servers]
    options = ["--combine=exact", "--sample", "--temperature=0.7", "--seed=5"]
    arguments = [str(SHAKESPEARE), f"--prompt={PROMPTS[0]}", "--max-new-tokens=24", *options]
    assert cli.main(["generate", *arguments, "--servers", *addresses]) == 0
    expected = continuation(PROMPTS[0], 24, seed=5, temperature=0.7)
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.usefixtures("in_process")
def test_over_fp8_a_client_writes_what_local_experts_write_of_rounded_tokens(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    addresses = [server.ready()["address"] for server in running.servers]
    arguments = [str(SHAKESPEARE), f"--prompt={PROMPTS[1]}", "--max-new-tokens=24"]
    options = ["--combine=exact", "--wire-dtype=fp8", "--servers", *addresses]
    assert cli.main(["generate", *arguments, *options]) == 0
    assert capsys.readouterr().out == continuation(PROMPTS[1], 24, fp8=True) + "\n"


def test_servers_leave_one_by_one_while_a_client_writes(running: Running) -> None:
    first, second, third = running.servers
    with running.generate(PROMPTS[1], 160) as client:
        wait_for(
            lambda: len(client.out) > len(PROMPTS[1]) + 16 or client.process.poll() is not None
        )
        first.send(signal.SIGTERM)
        assert first.end() == 0, first.err
        assert client.end() == 0, client.err
        # it drained, so nothing had to be asked twice because somebody was gone
        assert client.out.decode() == continuation(PROMPTS[1], 160) + "\n"
    # a second signal does not wait for the drain
    second.send(signal.SIGTERM)
    wait_for(lambda: _has_default_sigterm(second))
    second.send(signal.SIGTERM)
    assert second.end(timeout=1) == -signal.SIGTERM
    third.send(signal.SIGINT)
    assert third.end() == 0, third.err
    running.monitor.send(signal.SIGTERM)
    assert running.monitor.end() == 0, running.monitor.err


@pytest.mark.usefixtures("in_process")
def test_a_client_that_finds_no_server_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(SHAKESPEARE), "--prompt=A", "--max-new-tokens=1", "--wait=0.1"]
    assert cli.main(["generate", *arguments, "--servers", "unix:@nobody-is-here"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "torch-eaas generate: layer 1, expert 0 is unavailable (no server holds it): "
        "no server is known yet\n"
    )


def _status(process: Launched) -> str:
    return Path(f"/proc/{process.pid}/status").read_text()


def _has_default_sigterm(process: Launched) -> bool:
    """Return whether the kernel ends the process upon SIGTERM: Python does not catch it."""
    caught = next(line for line in _status(process).splitlines() if line.startswith("SigCgt"))
    return not int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1


def _tensor_sizes(folder: Path) -> dict[str, int]:
    """Read the sizes of all tensors from the files' headers, as the format describes them."""
    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            sizes[name] = end - begin
    return sizes
