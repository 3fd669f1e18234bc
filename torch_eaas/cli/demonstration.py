"""The process behind ``torch-eaas demo``: a cluster, one client in here, and a comparison."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from torch_eaas.access import Access
from torch_eaas.cli.cluster import Cluster, ClusterConfig
from torch_eaas.cli.decoding import DecodingOptions, decode
from torch_eaas.cli.findings import Findings, Kill
from torch_eaas.cli.generating import client_config
from torch_eaas.cli.killer import Killer
from torch_eaas.cli.phases import Mark, Phase, phase_of
from torch_eaas.cli.printer import Printer
from torch_eaas.cli.text import Text, text_of
from torch_eaas.client import Client
from torch_eaas.config import Combine
from torch_eaas.models.checkpoint import Checkpoint
from torch_eaas.models.load import load_client, load_local
from torch_eaas.models.moe import find_family, read_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to show with a cluster."""

    kill: bool
    """Whether a server dies in the middle."""

    prompt: str
    """The text to go on from."""

    combine: Combine
    """Who adds up a token's experts."""

    report: Path | None
    """Where to write the report."""

    decoding: DecodingOptions
    """How tokens are chosen."""

    access: Access
    """The token of the cluster, which its processes inherited."""


def demonstrate(options: DemoOptions, cluster: Cluster) -> int:
    """Show it; return the exit code. The servers may still be starting."""
    torch.set_num_threads(1)
    with Checkpoint(cluster.config.checkpoint) as checkpoint:
        shape, text = read_shape(checkpoint), text_of(checkpoint)
        place = find_family(checkpoint.config).experts
    config = client_config(shape, name="demo", combine=options.combine, access=options.access)
    with Client(config, monitor=cluster.url) as client:
        remote, local = load_client(checkpoint.path, client), load_local(checkpoint.path)
        findings = Findings(settings=_settings(options, cluster.config), servers=cluster.ready())
        client.wait_ready(shape.moe_layers, shape.num_experts)
        # what is alive now stays so: a full collection would only stop the client to find that out
        gc.freeze()
        stage = _Stage(options, text, findings)
        stage.introduce(cluster)
        stage.write_remote(remote, client, cluster)
        experts = [local.get_submodule(place.format(layer=layer)) for layer in shape.moe_layers]
        stage.write_local(local, _Stopwatch(experts))
    print(findings.text())
    report = findings.report()
    if options.report is not None:
        report.write(options.report)
    return 0 if all(check.ok for check in report.checks) else 1


class _Stage:
    """Generates the same text with one kind of experts and the other.

    Args:
        options: What to show.
        text: What the model reads and writes.
        findings: Takes what is found.
    """

    def __init__(self, options: DemoOptions, text: Text, findings: Findings) -> None:
        self._options = options
        self._text = text
        self._findings = findings
        self._printer = Printer()
        self._prompt = text.encode(options.prompt)

    def introduce(self, cluster: Cluster) -> None:
        """Say what is going to be seen."""
        decoding, servers = self._options.decoding, cluster.config
        self._printer.line(
            f"{servers.servers} expert servers, {servers.copies} of them hold each expert; "
            f"monitor at {cluster.url}\n{decoding.max_new_tokens} tokens, {decoding}\n"
        )
        self._printer.write(self._options.prompt)

    def write_remote(self, model: PreTrainedModel, client: Client, cluster: Cluster) -> None:
        """Print the text as servers' experts make it, and kill one of them meanwhile."""
        self._warm_up(model)
        decoding, findings = self._options.decoding, self._findings
        victim = f"server-{cluster.config.servers // 2}"
        after = max(decoding.max_new_tokens // 2, 1) if self._options.kill else 0
        killer = Killer(partial(cluster.kill, victim), after)
        decoder = self._text.decoder()

        def show(count: int, token: int) -> None:
            if killer.see(count):
                self._printer.line(f"-- {victim} is killed (SIGKILL) after {after} tokens --")
            self._printer.write(decoder(token))

        findings.remote, marks = decode(
            model, self._prompt, decoding, on_token=show, counters=client.counters
        )
        self._printer.write(decoder(None))
        self._printer.end()
        if killer.has_killed:
            findings.kill = Kill(server=victim, after=after)
        findings.phases += _phases(marks, after if killer.has_killed else len(marks))

    def write_local(self, model: PreTrainedModel, stopwatch: _Stopwatch) -> None:
        """Generate the text again, with all experts in this process."""
        self._warm_up(model)
        self._findings.local, marks = decode(
            model, self._prompt, self._options.decoding, counters=stopwatch.counters
        )
        phase = phase_of("local", marks)
        self._findings.phases[:0] = [phase] if phase is not None else []

    def _warm_up(self, model: PreTrainedModel) -> None:
        decode(model, self._prompt, replace(self._options.decoding, max_new_tokens=WARM_UP_TOKENS))


class _Stopwatch:
    """Adds up the time that modules take.

    Args:
        modules: The experts of all layers.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._seconds = 0.0
        self._started = 0.0
        for module in modules:
            module.register_forward_pre_hook(self._start)
            module.register_forward_hook(self._stop)

    def counters(self) -> Mapping[str, int]:
        """Return the time so far as a client tells it."""
        return {"experts_us": int(1e6 * self._seconds)}

    def _start(self, *_: object) -> None:
        self._started = time.monotonic()

    def _stop(self, *_: object) -> None:
        self._seconds += time.monotonic() - self._started


def _phases(marks: list[Mark], after: int) -> list[Phase]:
    """Return the phases before and after the kill; it came behind token ``after``."""
    if after >= len(marks):
        phases = [phase_of("remote", marks)]
    else:
        phases = [
            phase_of("remote", marks[:after]),
            phase_of("remote, one dead", marks[after - 1 :]),
        ]
    return [phase for phase in phases if phase is not None]


def _settings(options: DemoOptions, cluster: ClusterConfig) -> dict[str, str | int]:
    return {
        "checkpoint": cluster.checkpoint.name,
        "servers": cluster.servers,
        "copies": cluster.copies,
        "tokens": options.decoding.max_new_tokens,
        "decoding": str(options.decoding),
        "combine": options.combine,
        "storage": cluster.storage,
        "prompt": options.prompt,
    }
