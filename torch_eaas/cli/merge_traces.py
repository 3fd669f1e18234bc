"""``torch-eaas merge-traces``: one timeline of a client and its servers."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from torch_eaas.cli.traces import merge_traces, read_trace
from torch_eaas.cli.verb import Verb
from torch_eaas.errors import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("client", type=Path, metavar="CLIENT", help="the client's trace")
    parser.add_argument(
        "servers", type=Path, nargs="+", metavar="SERVER", help="the servers' traces"
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        required=True,
        metavar="FILE",
        help="where to write the merged trace; https://ui.perfetto.dev opens it",
    )


def run(args: Namespace, parser: ArgumentParser) -> int:
    """Merge, write, and print each server's clock."""
    names = [path.name.split(".")[0] for path in args.servers]
    if len(set(names)) < len(names):
        parser.error(f"the servers' files must have different names, got {', '.join(names)}")
    servers = {name: read_trace(path) for name, path in zip(names, args.servers, strict=True)}
    client_name = args.client.name.split(".")[0]
    merged, offsets = merge_traces(read_trace(args.client), servers, client_name)
    try:
        args.output.write_text(json.dumps(merged), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{args.output}: cannot be written: {error}") from error
    for name, offset in offsets.items():
        print(json.dumps({"server": name, **{k: round(v, 1) for k, v in asdict(offset).items()}}))
    return 0


VERB = Verb(
    name="merge-traces",
    summary="make one timeline of a client's and its servers' profiler traces",
    description=(
        "Put traces that torch.profiler exported (.json or .json.gz) on the client's clock and "
        "into one file for Perfetto or chrome://tracing, with an arrow for each request and each "
        "answer. The offset of a server's clock follows from the requests that both have "
        "recorded; a line of JSON for each server names it. A server records with "
        "'torch-eaas server --trace FILE'."
    ),
    add_arguments=add_arguments,
    run=run,
)
