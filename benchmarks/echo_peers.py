"""What else carries bytes between processes: multiprocessing's Pipe, gloo and zmq."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from benchmarks.echo import TIMEOUT_S, Echo, Side, check_same, payload


def _timed(trip: Callable[[], None], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        trip()
        times.append(time.perf_counter() - start)
    return times


class PipeEcho(Echo):
    """The pipe that the commands come over."""

    def __init__(self, side: Side, folder: Path, pipe: Pipe) -> None:
        self._pipe = pipe

    @override
    def trip(self, size: str, count: int) -> list[float]:
        data = payload(size).view(torch.int16).numpy()
        back = bytearray(data.nbytes)

        def trip() -> None:
            self._pipe.send_bytes(data)  # type: ignore[arg-type]  # any buffer
            self._pipe.recv_bytes_into(back)

        times = _timed(trip, count)
        check_same(back, size)
        return times

    @override
    def echo(self, size: str, count: int) -> None:
        buffer = bytearray(payload(size).nbytes)
        for _ in range(count):
            self._pipe.recv_bytes_into(buffer)
            self._pipe.send_bytes(buffer)

    @override
    def close(self) -> None:
        pass


class GlooEcho(Echo):
    """torch.distributed's send and recv over gloo; the group forms at the first trip."""

    def __init__(self, side: Side, folder: Path, pipe: Pipe) -> None:
        self._rank = 0 if side == "client" else 1
        self._store = folder / "gloo"

    @override
    @staticmethod
    def missing() -> str:
        return "" if dist.is_available() and dist.is_gloo_available() else "torch has no gloo"

    @override
    def trip(self, size: str, count: int) -> list[float]:
        self._join()
        data = payload(size)
        back = torch.empty_like(data)

        def trip() -> None:
            dist.send(data, 1)
            dist.recv(back, 1)

        times = _timed(trip, count)
        check_same(back.view(torch.int16).numpy(), size)
        return times

    @override
    def echo(self, size: str, count: int) -> None:
        self._join()
        buffer = torch.empty_like(payload(size))
        for _ in range(count):
            dist.recv(buffer, 0)
            dist.send(buffer, 0)

    @override
    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _join(self) -> None:
        if not dist.is_initialized():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self._store}",
                rank=self._rank,
                world_size=2,
                timeout=timedelta(seconds=TIMEOUT_S),
            )


class ZmqEcho(Echo):
    """A PAIR of pyzmq over ipc, without copies in Python where it can do without."""

    def __init__(self, side: Side, folder: Path, pipe: Pipe) -> None:
        import zmq  # optional

        self._socket: Any = zmq.Context().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
        self._socket.setsockopt(zmq.SNDTIMEO, int(TIMEOUT_S * 1000))
        self._socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{folder}/zmq"
        if side == "server":
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    @override
    @staticmethod
    def missing() -> str:
        return "" if find_spec("zmq") else "pyzmq is not installed"

    @override
    def trip(self, size: str, count: int) -> list[float]:
        data = payload(size).view(torch.int16).numpy()
        back: Any = None

        def trip() -> None:
            nonlocal back
            self._socket.send(data, copy=False)
            back = self._socket.recv(copy=False)

        times = _timed(trip, count)
        check_same(back.buffer, size)
        return times

    @override
    def echo(self, size: str, count: int) -> None:
        for _ in range(count):
            self._socket.send(self._socket.recv(copy=False), copy=False)

    @override
    def close(self) -> None:
        self._socket.close()
