"""``torch-eaas generate``: a client that writes text with experts of other processes."""

from argparse import ArgumentParser, Namespace
from datetime import timedelta
from pathlib import Path
from typing import get_args

from torch_eaas.cli import access, arguments
from torch_eaas.cli.environment import set_threads, torchrun_rank
from torch_eaas.cli.verb import Verb
from torch_eaas.config import Combine, WireDtype

DTYPES = ("fp32", "bf16", "fp16")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its directory")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--monitor", metavar="URL", help="the monitor that knows the servers")
    where.add_argument(
        "--servers", nargs="+", metavar="ADDRESS", help="control endpoints, where no monitor runs"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="the text to go on from; of several, each rank of a torchrun launch takes its own",
    )
    parser.add_argument("--max-new-tokens", type=arguments.count, required=True, metavar="N")
    parser.add_argument("--name", help="what this client is called (client, or client-RANK)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="of the client's weights (%(default)s)"
    )
    parser.add_argument(
        "--combine",
        choices=get_args(Combine),
        default="partial",
        help="who adds up a token's experts: the servers (partial), or the client in an order "
        "that does not depend on the placement (exact); %(default)s",
    )
    parser.add_argument(
        "--wire-dtype",
        choices=get_args(WireDtype),
        default="fp32",
        help="of hidden states on their way to a server; fp8 has a scale for each 128 numbers "
        "(%(default)s)",
    )
    parser.add_argument("--sample", action="store_true", help="draw tokens, do not take the best")
    add_sampling(parser)
    parser.add_argument(
        "--wait",
        type=arguments.seconds,
        default=timedelta(seconds=60),
        metavar="SECONDS",
        help="how long to wait until every expert has a server (60)",
    )
    parser.add_argument(
        "--threads", type=arguments.count, default=1, help="threads of the client (%(default)s)"
    )
    arguments.add_transport(parser)
    access.add_token(parser)
    access.add_authority(parser)


def add_sampling(parser: ArgumentParser) -> None:
    """Declare the options of drawing tokens."""
    parser.add_argument(
        "--temperature",
        type=arguments.positive,
        default=0.8,
        metavar="T",
        help="at which tokens are drawn (%(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=arguments.seed,
        default=0,
        metavar="N",
        help="of the drawing: the same seed gives the same text (%(default)s)",
    )


def run(args: Namespace, parser: ArgumentParser) -> int:
    """Load the model and write."""
    set_threads(args.threads)
    rank = torchrun_rank()
    # torch is imported only now
    from torch_eaas.cli.decoding import DecodingOptions
    from torch_eaas.cli.generating import GenerateOptions, generate

    name = args.name or "client"
    return generate(
        GenerateOptions(
            checkpoint=args.checkpoint,
            monitor=args.monitor,
            servers=tuple(args.servers or ()),
            transport=args.transport,
            prompt=args.prompt[(rank or 0) % len(args.prompt)],
            name=name if rank is None else f"{name}-{rank}",
            prefix="" if rank is None else f"[{name}-{rank}] ",
            dtype=args.dtype,
            combine=args.combine,
            wire_dtype=args.wire_dtype,
            wait=args.wait,
            threads=args.threads,
            access=access.access_of(args),
            decoding=DecodingOptions(
                max_new_tokens=args.max_new_tokens,
                temperature=args.temperature if args.sample else None,
                seed=args.seed,
            ),
        )
    )


VERB = Verb(
    name="generate",
    summary="generate text with experts of other processes",
    description=(
        "Load a checkpoint's attention, routers and shared experts, wait until every routed "
        "expert has a server, and print text as it is generated; a line on stderr sums up. The "
        "likeliest token is taken unless --sample is given."
    ),
    add_arguments=add_arguments,
    run=run,
)
