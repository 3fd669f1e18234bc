"""``torch-eaas monitor``: the one service that knows who is alive and who holds what."""

from argparse import ArgumentParser, Namespace

from torch_eaas.cli import access, arguments
from torch_eaas.cli.verb import Verb
from torch_eaas.config import HEARTBEAT, LEASE, MonitorConfig


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to bind (%(default)s); one that other machines reach needs a token",
    )
    parser.add_argument(
        "--port", type=arguments.port, default=0, help="port to bind; 0 takes a free one (default)"
    )
    parser.add_argument(
        "--lease",
        type=arguments.seconds,
        default=LEASE,
        metavar="SECONDS",
        help=f"how long a silent member counts as alive ({LEASE.total_seconds():g}); "
        f"heartbeats come ten times as often",
    )
    access.add_token(parser)
    access.add_certificate(parser)


def run(args: Namespace, parser: ArgumentParser) -> int:
    """Serve until a signal comes."""
    # the web framework takes longer to import than --help may
    from torch_eaas.monitor.app import run as serve

    heartbeat = args.lease * (HEARTBEAT / LEASE)
    return serve(
        MonitorConfig(
            host=args.host,
            port=args.port,
            lease=args.lease,
            heartbeat=heartbeat,
            access=access.access_of(args),
        )
    )


VERB = Verb(
    name="monitor",
    summary="run the control service",
    description=(
        "Run the control service. It prints one line of JSON once it answers: its URL and pid. "
        "SIGTERM or SIGINT ends it."
    ),
    add_arguments=add_arguments,
    run=run,
)
