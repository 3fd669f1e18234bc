"""The process behind ``torch-eaas generate``: a client and transformers' ``generate``."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from torch_eaas.access import Access
from torch_eaas.cli.decoding import DecodingOptions, decode
from torch_eaas.cli.phases import phase_of
from torch_eaas.cli.printer import Printer
from torch_eaas.cli.text import text_of
from torch_eaas.client import Client
from torch_eaas.config import ClientConfig, Combine, WireDtype
from torch_eaas.models.checkpoint import Checkpoint
from torch_eaas.models.family import MoeShape
from torch_eaas.models.load import load_client
from torch_eaas.models.moe import read_shape

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What one client process writes, and with whose experts."""

    checkpoint: Path
    """The checkpoint's directory."""

    monitor: str | None
    """The monitor's URL, or None where ``servers`` are named."""

    servers: tuple[str, ...]
    """Control endpoints."""

    transport: str
    """The transport's name, or auto."""

    prompt: str
    """The text to go on from."""

    name: str
    """What the client is called."""

    prefix: str
    """Of each line, where several processes share the terminal."""

    dtype: str
    """Of the client's weights."""

    combine: Combine
    """Who adds up a token's experts."""

    wire_dtype: WireDtype
    """Of hidden states that travel to servers."""

    wait: timedelta
    """How long to wait until every expert has a server."""

    threads: int
    """Threads of the client."""

    access: Access
    """What servers and monitor are shown."""

    decoding: DecodingOptions
    """How tokens are chosen."""


def client_config(
    shape: MoeShape,
    *,
    name: str,
    combine: Combine,
    access: Access,
    wire_dtype: WireDtype = "fp32",
) -> ClientConfig:
    """Return the configuration of a client of a checkpoint's servers."""
    return ClientConfig(
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        name=name,
        combine=combine,
        wire_dtype=wire_dtype,
        fingerprint=shape.fingerprint,
        access=access,
    )


def generate(options: GenerateOptions) -> int:
    """Print a text as it is generated; return the exit code."""
    torch.set_num_threads(options.threads)
    with Checkpoint(options.checkpoint) as checkpoint:
        shape, text = read_shape(checkpoint), text_of(checkpoint)
    config = client_config(
        shape,
        name=options.name,
        combine=options.combine,
        access=options.access,
        wire_dtype=options.wire_dtype,
    )
    with Client(
        config,
        servers=options.servers,
        monitor=options.monitor,
        transport=options.transport,
    ) as client:
        model = load_client(options.checkpoint, client, dtype=TORCH_DTYPES[options.dtype])
        client.wait_ready(shape.moe_layers, shape.num_experts, options.wait)
        # what is alive now stays so: a full collection would only stop the client to find that out
        gc.freeze()
        printer, decoder = Printer(options.prefix), text.decoder()
        printer.write(options.prompt)
        _, marks = decode(
            model,
            text.encode(options.prompt),
            options.decoding,
            on_token=lambda count, token: printer.write(decoder(token)),
            counters=client.counters,
        )
        printer.write(decoder(None))
        printer.end()
    phase = phase_of(options.name, marks)
    if phase is not None:
        print(
            f"{phase.name}: {phase.tokens + 1} tokens at {phase.tokens_per_s:.1f} tokens/s, of "
            f"{phase.total_ms:.2f} ms each {phase.experts_ms:.2f} experts, {phase.waiting_ms:.2f} "
            f"waiting beyond them, {phase.bookkeeping_ms:.2f} bookkeeping; asked again "
            f"{phase.resends}, hedged {phase.hedges}",
            file=sys.stderr,
        )
    return 0
