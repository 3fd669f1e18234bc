"""The least that a round trip costs: a loop in C that copies, stores a word, and spins on one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import torch
from typing_extensions import override

from benchmarks.echo import SIZES, TIMEOUT_S, Echo, Side, check_same, payload
from torch_eaas.comm.window import Window, adopt_window, create_window
from torch_eaas.errors import PeerTimeout, TransportError

WORD_BYTES = 128
LARGEST = max(2 * num_tokens * hidden for num_tokens, hidden in SIZES.values())
COMPILERS = ("cc", "gcc", "clang")

SOURCE = r"""
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int await_word(char *window, uint64_t word, double limit) {
    _Atomic uint64_t *at = (_Atomic uint64_t *)window;
    for (uint64_t spins = 1;; spins++) {
        if (atomic_load_explicit(at, memory_order_acquire) == word) return 0;
        if ((spins & 0xfffff) == 0 && now() > limit) return -1;
    }
}

static void put(char *window, const char *data, uint64_t size, uint64_t word) {
    memcpy(window + 128, data, size);
    atomic_store_explicit((_Atomic uint64_t *)window, word, memory_order_release);
}

int trip(char *requests, char *replies, const char *data, uint64_t size,
         uint64_t word, uint64_t count, double timeout, double *seconds) {
    for (uint64_t i = 0; i < count; i++) {
        double start = now();
        put(requests, data, size, word + i);
        if (await_word(replies, word + i, start + timeout)) return -1;
        seconds[i] = now() - start;
    }
    return 0;
}

int echo(char *requests, char *replies, uint64_t size,
         uint64_t word, uint64_t count, double timeout) {
    for (uint64_t i = 0; i < count; i++) {
        if (await_word(requests, word + i, now() + timeout)) return -1;
        put(replies, requests + 128, size, word + i);
    }
    return 0;
}
"""


class FloorEcho(Echo):
    """Two copies and two words a trip, in memory that both ends have mapped."""

    def __init__(self, side: Side, folder: Path, pipe: Pipe) -> None:
        names = ("requests", "replies")
        if side == "server":
            self._windows = [create_window(WORD_BYTES + LARGEST) for _ in names]
            for name, window in zip(names, self._windows, strict=True):
                os.symlink(f"/proc/{os.getpid()}/fd/{window.fd}", folder / name)
            _compile(folder)
        else:
            self._windows = [_open(folder / name) for name in names]
        self._library = ctypes.CDLL(str(folder / "floor.so"))
        self._bases = [
            (ctypes.c_char * window.nbytes).from_buffer(window.view) for window in self._windows
        ]
        self._word = 1

    @override
    @staticmethod
    def missing() -> str:
        return "" if _compiler() else f"no C compiler ({', '.join(COMPILERS)})"

    @override
    def trip(self, size: str, count: int) -> list[float]:
        data = payload(size)
        seconds = (ctypes.c_double * count)()
        late = self._library.trip(
            *self._bases,
            ctypes.c_void_p(data.data_ptr()),
            ctypes.c_uint64(data.nbytes),
            *self._next(count),
            ctypes.c_double(TIMEOUT_S),
            seconds,
        )
        if late:
            raise PeerTimeout(f"the floor's client saw no answer within {TIMEOUT_S:g} s")
        check_same(self._windows[1].view[WORD_BYTES : WORD_BYTES + data.nbytes], size)
        return list(seconds)

    @override
    def echo(self, size: str, count: int) -> None:
        num_bytes = payload(size).view(torch.int16).nbytes
        late = self._library.echo(
            *self._bases,
            ctypes.c_uint64(num_bytes),
            *self._next(count),
            ctypes.c_double(TIMEOUT_S),
        )
        if late:
            raise PeerTimeout(f"the floor's server saw no request within {TIMEOUT_S:g} s")

    @override
    def close(self) -> None:
        for window in self._windows:
            window.close()

    def _next(self, count: int) -> tuple[ctypes.c_uint64, ctypes.c_uint64]:
        """Return the first word of ``count`` and ``count``; both ends count alike."""
        word, self._word = self._word, self._word + count
        return ctypes.c_uint64(word), ctypes.c_uint64(count)


def _compiler() -> str | None:
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def _compile(folder: Path) -> None:
    source = folder / "floor.c"
    source.write_text(SOURCE, encoding="ascii")
    compiler = _compiler()
    assert compiler is not None
    command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(folder / "floor.so")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise TransportError(f"the floor does not compile: {done.stderr}")


def _open(path: Path) -> Window:
    return adopt_window(os.open(path, os.O_RDWR | os.O_CLOEXEC), WORD_BYTES + LARGEST)
