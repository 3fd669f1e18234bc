"""The process behind ``torch-eaas demo``: a cluster, one client in here, and a comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from torch_eaas.cli.cluster import Cluster, ClusterConfig
from torch_eaas.cli.decoding import DecodingOptions, decode
from torch_eaas.cli.findings import Findings, Kill
from torch_eaas.cli.generating import client_config
from torch_eaas.cli.killer import Killer
from torch_eaas.cli.phases import Mark, Phase, phase_of
from torch_eaas.cli.printer import Printer
from torch_eaas.cli.text import Text, text_of
from torch_eaas.client import Client
from torch_eaas.config import Combine, Storage
from torch_eaas.models.checkpoint import Checkpoint
from torch_eaas.models.load import load_client, load_local
from torch_eaas.models.moe import find_family, read_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STORAGE: Storage = "fp32"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to show."""

    checkpoint: Path
    """The model."""

    servers: int
    """Expert servers."""

    copies: int
    """Holders of each expert."""

    kill: bool
    """Whether a server dies in the middle."""

    prompt: str
    """The text to go on from."""

    combine: Combine
    """Who adds up a token's experts."""

    report: Path | None
    """Where to write the report."""

    log_level: str
    """Of the children."""

    decoding: DecodingOptions
    """How tokens are chosen."""

    @property
    def victim(self) -> str:
        """The server that dies."""
        return f"server-{self.servers // 2}"


def demonstrate(options: DemoOptions) -> int:
    """Show it; return the exit code."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(_cluster_config(options)))
        # the servers start while this process loads
        checkpoint = stack.enter_context(Checkpoint(options.checkpoint))
        shape = read_shape(checkpoint)
        config = client_config(shape, name="demo", combine=options.combine, storage=STORAGE)
        client = stack.enter_context(Client(config, monitor=cluster.url))
        remote, local = load_client(checkpoint.path, client), load_local(checkpoint.path)
        findings = Findings(settings=_settings(options), servers=cluster.ready())
        client.wait_ready(shape.moe_layers, shape.num_experts)

        stage = _Stage(options, text_of(checkpoint), Printer())
        stage.introduce(cluster.url)
        stage.write_remote(remote, client.counters, cluster, findings)
        place = find_family(checkpoint.config).experts
        layers = [local.get_submodule(place.format(layer=layer)) for layer in shape.moe_layers]
        stage.write_local(local, _Stopwatch(layers).counters, findings)
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
        printer: Where the text appears.
    """

    def __init__(self, options: DemoOptions, text: Text, printer: Printer) -> None:
        self._options = options
        self._text = text
        self._printer = printer
        self._prompt = text.encode(options.prompt)

    def introduce(self, url: str) -> None:
        """Say what is going to be seen."""
        options = self._options
        self._printer.line(
            f"{options.servers} expert servers, {options.copies} of them hold each expert; "
            f"monitor at {url}\n{options.decoding.max_new_tokens} tokens, {options.decoding}\n"
        )
        self._printer.write(options.prompt)

    def write_remote(
        self,
        model: PreTrainedModel,
        counters: Callable[[], Mapping[str, int]],
        cluster: Cluster,
        findings: Findings,
    ) -> None:
        """Print the text as servers' experts make it, and kill one of them meanwhile."""
        self._warm_up(model)
        options, victim = self._options, self._options.victim
        after = max(options.decoding.max_new_tokens // 2, 1) if options.kill else 0
        killer = Killer(partial(cluster.kill, victim), after)
        decoder = self._text.decoder()

        def show(count: int, token: int) -> None:
            if killer.see(count):
                self._printer.line(f"-- {victim} is killed (SIGKILL) after {after} tokens --")
            self._printer.write(decoder(token))

        findings.remote, marks = decode(
            model, self._prompt, options.decoding, on_token=show, counters=counters
        )
        self._printer.write(decoder(None))
        self._printer.end()
        if killer.has_killed:
            findings.kill = Kill(server=victim, after=after)
        findings.phases += _phases(marks, after if killer.has_killed else len(marks))

    def write_local(
        self,
        model: PreTrainedModel,
        counters: Callable[[], Mapping[str, int]],
        findings: Findings,
    ) -> None:
        """Generate the text again, with all experts in this process."""
        self._warm_up(model)
        findings.local, marks = decode(
            model, self._prompt, self._options.decoding, counters=counters
        )
        phase = phase_of("local", marks)
        findings.phases[:0] = [phase] if phase is not None else []

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


def _cluster_config(options: DemoOptions) -> ClusterConfig:
    return ClusterConfig(
        checkpoint=options.checkpoint,
        servers=options.servers,
        copies=options.copies,
        storage=STORAGE,
        log_level=options.log_level,
    )


def _settings(options: DemoOptions) -> dict[str, str | int]:
    return {
        "checkpoint": options.checkpoint.name,
        "servers": options.servers,
        "copies": options.copies,
        "tokens": options.decoding.max_new_tokens,
        "decoding": str(options.decoding),
        "combine": options.combine,
        "storage": STORAGE,
        "prompt": options.prompt,
    }
