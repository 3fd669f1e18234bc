"""What each file of a verb gives to the command line."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One subcommand. Its file imports nothing heavy; what ``run`` needs is imported there."""

    name: str
    """As the user types it."""

    summary: str
    """One line for the list of verbs."""

    description: str
    """What ``--help`` says first."""

    add_arguments: Callable[[ArgumentParser], None]
    """Declares the options."""

    run: Callable[[Namespace, ArgumentParser], int]
    """Does the work and returns the exit code; the parser is for errors of usage."""

    log_level: str = "warning"
    """The log level unless ``--log-level`` names one."""
