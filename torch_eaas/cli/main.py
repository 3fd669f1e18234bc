"""The command line: reads the arguments, runs a verb, and turns errors into exit codes.

Exit codes: 0 all is well, 1 it failed, 2 the arguments are wrong.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import torch_eaas
from torch_eaas.cli import demo, generate, launch, merge_traces, monitor, server
from torch_eaas.cli.parent import die_with
from torch_eaas.errors import EaasError

VERBS = (
    monitor.VERB,
    server.VERB,
    generate.VERB,
    launch.VERB,
    merge_traces.VERB,
    demo.VERB,
)
LOG_LEVELS = ("debug", "info", "warning", "error")
PARENT = "--parent"
"""First argument of a process that another one starts; its pid follows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``torch-eaas`` and return its exit code.

    Args:
        argv: The arguments; by default those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == [PARENT] and len(arguments) > 1 and arguments[1].isdecimal():
        # before anything else: nothing heavy is imported yet
        die_with(int(arguments[1]))
        arguments = arguments[2:]
    parser, verbs = _parsers()
    args = parser.parse_args(arguments)
    verb = next(verb for verb in VERBS if verb.name == args.verb)
    _log_to_stderr(args.log_level or verb.log_level)
    try:
        return verb.run(args, verbs[verb.name])
    except EaasError as error:
        if args.debug:
            raise
        print(f"torch-eaas {verb.name}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"torch-eaas {verb.name}: interrupted", file=sys.stderr)
    except BrokenPipeError:
        # the reader of stdout has left; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="torch-eaas",
        description="Expert-as-a-Service: MoE models whose experts live in other processes.",
        epilog="Exit codes: 0 all is well, 1 it failed, 2 the arguments are wrong.",
    )
    parser.add_argument(
        "--version", action="version", version=f"torch-eaas {torch_eaas.__version__}"
    )
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs = {}
    for verb in VERBS:
        own = subparsers.add_parser(verb.name, help=verb.summary, description=verb.description)
        verb.add_arguments(own)
        own.add_argument(
            "--log-level",
            choices=LOG_LEVELS,
            help=f"what is told on stderr (default: {verb.log_level})",
        )
        own.add_argument("--debug", action="store_true", help="show where an error was raised")
        verbs[verb.name] = own
    return parser, verbs


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # other libraries keep their own levels
    logging.getLogger("torch_eaas").setLevel(level.upper())
