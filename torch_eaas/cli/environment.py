"""Environment variables: the command line reads and sets them here and nowhere else."""

import os
from collections.abc import Mapping

CALM = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads of OpenMP that spin at their barriers starve the other processes of a shared core."""

TOKEN = "TORCH_EAAS_TOKEN"
"""The cluster's token; children inherit it."""


def token_of(environment: Mapping[str, str] = os.environ) -> str:
    """Return the cluster's token, or nothing."""
    return environment.get(TOKEN, "")


def hand_on_token(token: str) -> None:
    """Let the processes that this one starts inherit the token."""
    if token:
        os.environ[TOKEN] = token


def child_environment() -> dict[str, str]:
    """Return what children of this process start with: one thread each, which does not spin."""
    return {**os.environ, **CALM, "OMP_NUM_THREADS": "1"}


def set_threads(count: int) -> None:
    """Choose the threads of this process's arithmetic; call it before torch is imported."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    for name, value in CALM.items():
        os.environ.setdefault(name, value)


def torchrun_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's rank within a torchrun launch of several, or None."""
    several = int(environment.get("WORLD_SIZE", "1")) > 1
    return int(environment["RANK"]) if several and "RANK" in environment else None
