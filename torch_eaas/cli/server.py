"""``torch-eaas server``: serve some of a checkpoint's experts."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from torch_eaas.cli import access, arguments
from torch_eaas.cli.environment import set_threads
from torch_eaas.cli.verb import Verb
from torch_eaas.comm.tcp_sockets import is_tcp
from torch_eaas.config import Combine, ReplyDtype, Storage, WireDtype


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its directory")
    parser.add_argument("--monitor", metavar="URL", help="the monitor to join, if any")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--share",
        type=arguments.share,
        default=(0, 1),
        metavar="INDEX/COUNT",
        help="serve this server's part of the experts of every layer, of COUNT servers (0/1)",
    )
    which.add_argument(
        "--experts",
        type=arguments.expert_ids,
        metavar="IDS",
        help="serve these experts of every layer, like 0-7,12",
    )
    which.add_argument(
        "--standby",
        action="store_true",
        help="serve nothing at first; load what the monitor asks for when others fail",
    )
    parser.add_argument(
        "--room",
        type=arguments.count,
        metavar="N",
        help="most experts to load beside its own when the monitor asks (none; with --standby all)",
    )
    parser.add_argument(
        "--copies",
        type=arguments.count,
        default=1,
        help="servers that hold each expert, with --share (%(default)s)",
    )
    parser.add_argument(
        "--storage",
        choices=get_args(Storage),
        help="how weights are kept (fp32; bf16 on a GPU); on a CPU fp8 saves memory, not time",
    )
    parser.add_argument("--name", help="unique among the servers (server-INDEX or server-PID)")
    parser.add_argument(
        "--address", default="", help="control endpoint, unix:/path or unix:@name (any)"
    )
    arguments.add_transport(parser)
    parser.add_argument(
        "--max-rows",
        type=arguments.count,
        default=2048,
        help="most (token, expert) rows of one batch (%(default)s)",
    )
    parser.add_argument(
        "--threads", type=arguments.count, default=1, help="threads of the experts (%(default)s)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="record with torch.profiler from start to end, for merge-traces; for short runs only",
    )
    _add_device(parser)
    access.add_token(parser)
    access.add_authority(parser)


def _add_device(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a server on a GPU", "what every client must have: a GPU's work is captured for it"
    )
    group.add_argument(
        "--device",
        type=arguments.device,
        default="cpu",
        help="cpu, cuda or cuda:N (%(default)s); a GPU answers by itself, the host only replays",
    )
    group.add_argument(
        "--max-tokens",
        type=arguments.count,
        default=128,
        help="most tokens of a request (%(default)s)",
    )
    group.add_argument(
        "--max-micro-batches",
        type=arguments.count,
        default=3,
        help="most requests of a client at once, but for one given up (%(default)s)",
    )
    group.add_argument(
        "--max-clients", type=arguments.count, default=64, help="most clients (%(default)s)"
    )
    for name, choices, default in (
        ("wire-dtype", WireDtype, "fp32"),
        ("reply-dtype", ReplyDtype, "fp32"),
        ("combine", Combine, "partial"),
    ):
        group.add_argument(f"--{name}", choices=get_args(choices), default=default)


def run(args: Namespace, parser: ArgumentParser) -> int:
    """Load the experts and serve them until a signal comes."""
    index, count = args.share
    if args.experts is not None and args.copies != 1:
        parser.error("--copies goes with --share, not with --experts")
    if (args.standby or args.room) and args.monitor is None:
        parser.error("--standby and --room need --monitor, which says what to load")
    if args.standby and args.copies != 1:
        parser.error("--copies goes with --share, not with --standby")
    if args.experts is None and args.copies > count:
        parser.error(f"--copies must be at most the number of servers ({count}), got {args.copies}")
    if is_tcp(args.address):
        parser.error(
            f"--address {args.address}: transports that are picked by name join processes of one "
            f"host: give unix:/path or unix:@name; between hosts it takes NvshmemTransport, in a "
            f"program of your own (docs/nvshmem.md)"
        )
    set_threads(args.threads)
    # torch is imported only now
    from torch_eaas.cli.serving import PairOptions, ServeOptions, serve

    return serve(
        ServeOptions(
            checkpoint=args.checkpoint,
            monitor=args.monitor,
            share=args.share,
            copies=args.copies,
            experts=() if args.standby else args.experts,
            room=args.room,
            storage=args.storage or ("fp32" if args.device == "cpu" else "bf16"),
            name=args.name or f"server-{index if count > 1 else os.getpid()}",
            address=args.address,
            transport=args.transport,
            max_rows=args.max_rows,
            threads=args.threads,
            trace=args.trace,
            device=None if args.device == "cpu" else args.device,
            pairs=PairOptions(
                max_tokens=args.max_tokens,
                max_micro_batches=args.max_micro_batches,
                max_clients=args.max_clients,
                wire_dtype=args.wire_dtype,
                reply_dtype=args.reply_dtype,
                combine=args.combine,
            ),
            access=access.access_of(args),
        )
    )


VERB = Verb(
    name="server",
    summary="serve some of a checkpoint's experts",
    description=(
        "Serve some of a checkpoint's experts; of the checkpoint only their bytes are read. One "
        "line of JSON on stdout says when clients may come. SIGTERM or SIGINT drains: what only "
        "this server holds is loaded elsewhere if there is room, and clients go to other holders "
        "first. A second one ends it at once."
    ),
    add_arguments=add_arguments,
    run=run,
)
