"""``torch-eaas launch``: a local cluster from one file, kept running."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from torch_eaas.cli import access
from torch_eaas.cli.cluster_file import ClusterFile, read_cluster_file
from torch_eaas.cli.environment import hand_on_token
from torch_eaas.cli.roles import roles_of
from torch_eaas.cli.supervisor import Supervisor
from torch_eaas.cli.verb import Verb


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the cluster, in TOML")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the file, print each process's name and command as JSON, and start none",
    )
    access.add_token(parser)


def run(args: Namespace, parser: ArgumentParser) -> int:
    """Run the cluster until it ends."""
    file = read_cluster_file(args.file)
    # in the environment, not on command lines: those are for everybody to read
    hand_on_token(_token(args, file))
    roles = roles_of(file)
    if args.dry_run:
        for role in roles:
            # the URL is not known before the monitor runs
            command = role.command("" if role.kind == "monitor" else "{monitor}")
            print(json.dumps({"name": role.name, "command": list(command)}))
        return 0
    return Supervisor(roles).run()


def _token(args: Namespace, file: ClusterFile) -> str:
    """Return the token of the option, else of the cluster's file, else of the environment."""
    path = file.access.token_file
    if args.token_file is None and path is not None:
        return access.read_token(path, f"{file.path}: [access] token_file")
    return access.access_of(args).token


VERB = Verb(
    name="launch",
    summary="run a local cluster from one file and restart what fails",
    description=(
        "Start the monitor, the servers and the clients that a TOML file names. One line of JSON "
        "on stdout says when clients may come. A process that fails is started again, later each "
        "time, until its max_restarts are used up: then all is ended and the exit code is 1. When "
        "all clients have ended with 0, so does this. SIGTERM or SIGINT ends clients, servers "
        "(they drain) and the monitor, in this order; a second one ends all at once. Nothing "
        "outlives this process, even if it is killed."
    ),
    add_arguments=add_arguments,
    run=run,
    log_level="info",
)
