"""``torch-eaas demo``: text goes on though a server is killed while it is generated."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

import torch_eaas
from torch_eaas.access import Access
from torch_eaas.cli import arguments
from torch_eaas.cli.cluster import Cluster, ClusterConfig
from torch_eaas.cli.environment import set_threads, token_of
from torch_eaas.cli.generate import add_sampling
from torch_eaas.cli.verb import Verb
from torch_eaas.config import Combine
from torch_eaas.errors import CheckpointError

CHECKPOINT = Path(torch_eaas.__file__).parent / "assets" / "shakespeare"
LOG_LEVEL = "error"
PROMPT = "ROMEO:\n"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument(
        "--tokens",
        type=arguments.count,
        default=256,
        metavar="N",
        help="tokens to generate (%(default)s)",
    )
    parser.add_argument(
        "--servers",
        type=arguments.count,
        default=3,
        metavar="N",
        help="expert servers (%(default)s)",
    )
    parser.add_argument(
        "--copies",
        type=arguments.count,
        default=2,
        metavar="N",
        help="holders of each expert (%(default)s)",
    )
    parser.add_argument("--no-kill", action="store_true", help="let all servers live")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=CHECKPOINT,
        metavar="DIR",
        help="another one than the small model that comes with torch-eaas",
    )
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="the text to go on from")
    parser.add_argument(
        "--combine", choices=get_args(Combine), default="partial", help="see generate (%(default)s)"
    )
    # a model as small as this one soon repeats itself when the likeliest token is taken
    parser.add_argument("--greedy", action="store_true", help="take the likeliest tokens")
    add_sampling(parser)
    parser.set_defaults(temperature=0.7, seed=1)


def run(args: Namespace, parser: ArgumentParser) -> int:
    """Start a cluster, write, kill, compare."""
    if args.copies > args.servers:
        parser.error(f"--copies must be at most --servers ({args.servers}), got {args.copies}")
    if args.copies < 2 and not args.no_kill:
        parser.error("with one holder of each expert nothing may be killed: add --no-kill")
    if not args.checkpoint.is_dir():
        # before four processes find that out
        raise CheckpointError(f"{args.checkpoint}: is no directory; a checkpoint is one")
    set_threads(1)
    config = ClusterConfig(
        checkpoint=args.checkpoint,
        servers=args.servers,
        copies=args.copies,
        storage="fp32",
        log_level=args.log_level or LOG_LEVEL,
    )
    with Cluster(config) as cluster:
        # torch is imported only now, while the servers import it too
        from torch_eaas.cli.decoding import DecodingOptions
        from torch_eaas.cli.demonstration import DemoOptions, demonstrate

        decoding = DecodingOptions(
            max_new_tokens=args.tokens,
            temperature=None if args.greedy else args.temperature,
            seed=args.seed,
        )
        options = DemoOptions(
            kill=not args.no_kill,
            prompt=args.prompt,
            combine=args.combine,
            report=args.json,
            decoding=decoding,
            access=Access(token=token_of()),
        )
        return demonstrate(options, cluster)


VERB = Verb(
    name="demo",
    summary="generate text while a server is killed, on this machine alone",
    description=(
        "Start a monitor and some expert servers, generate text with their experts, kill one of "
        "them in the middle of it, generate the same with local experts, and compare. Needs no "
        "GPU, no network and no other checkpoint. Exit code 1 if the tokens differ or a server "
        "read more than its own experts."
    ),
    add_arguments=add_arguments,
    run=run,
    log_level=LOG_LEVEL,
)
