"""Round trips between two processes on a core each: our slots against what else there is.

Every variant carries the payload both ways. They take turns, round by round, in one run.
"""

from __future__ import annotations

import shutil
import tempfile
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch

from benchmarks.echo import SIZES, Echo
from benchmarks.echo_floor import FloorEcho
from benchmarks.echo_peers import GlooEcho, PipeEcho, ZmqEcho
from benchmarks.echo_slots import SlotEcho
from benchmarks.harness import Options, cores, figures, pinned
from benchmarks.workers import Worker
from torch_eaas.cli.report import Report

VARIANTS: dict[str, type[Echo]] = {
    "shm": SlotEcho,
    "floor": FloorEcho,
    "pipe": PipeEcho,
    "gloo": GlooEcho,
    "zmq": ZmqEcho,
}
TRIPS = {"64B": 500, "14k": 500, "900k": 100}
"""Round trips of a round."""

CHECKS = (
    ("shm_14k_vs_gloo", "gloo", "shm", "14k", ">= 8"),
    ("shm_14k_vs_zmq", "zmq", "shm", "14k", ">= 8"),
    ("shm_14k_vs_floor", "shm", "floor", "14k", "<= 25"),
    ("shm_900k_vs_zmq", "zmq", "shm", "900k", ">= 4"),
    ("shm_900k_vs_floor", "shm", "floor", "900k", "<= 1.5"),
)
"""Name, what is divided by what, at which size, and the target."""


def run(options: Options) -> Report:
    """Measure every variant at every size."""
    report = Report(name="transport")
    names = [name for name, variant in VARIANTS.items() if not variant.missing()]
    for name, variant in VARIANTS.items():
        if variant.missing():
            print(f"{name} is left out: {variant.missing()}")
    times = _measure(options, names)
    for size in SIZES:
        for name in names:
            report.add_row(name, size, **figures(times[name, size]))
    for name, over, under, size, target in CHECKS:
        if report.has_rows((over, size), (under, size)):
            formula = f"rows['{over}','{size}'].p50_us / rows['{under}','{size}'].p50_us"
            report.add_check(name, formula, target)
    return report


def _measure(options: Options, names: list[str]) -> dict[tuple[str, str], list[list[float]]]:
    """Return the times of each variant and size, a list for each round."""
    client_core, server_core = cores()
    folder = Path(tempfile.mkdtemp(prefix="eaas-bench-"))
    torch.set_num_threads(1)
    times: dict[tuple[str, str], list[list[float]]] = {}
    try:
        with pinned(client_core), Worker(serve, (folder, names), cores=[server_core]) as worker:
            worker.receive()
            echoes = {name: VARIANTS[name]("client", folder, worker.pipe) for name in names}
            for number in range(-1, options.rounds):
                for size in SIZES:
                    for name, echo in echoes.items():
                        # round -1 warms up: connections form, memory is touched
                        trips = options.count(TRIPS[size]) if number >= 0 else 5
                        worker.pipe.send((name, size, trips))
                        round_s = echo.trip(size, trips)
                        worker.receive(timeout=30)
                        if number >= 0:
                            times.setdefault((name, size), []).append(round_s)
            for echo in echoes.values():
                echo.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return times


def serve(pipe: Pipe, folder: Path, names: list[str]) -> None:
    """Be the other end: echo what the pipe asks for, until it ends."""
    torch.set_num_threads(1)
    echoes = {name: VARIANTS[name]("server", folder, pipe) for name in names}
    pipe.send("ready")
    while True:
        try:
            command: Any = pipe.recv()
        except EOFError:
            return
        name, size, trips = command
        echoes[name].echo(size, trips)
        pipe.send("done")
