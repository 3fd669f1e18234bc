"""A stream of a device, marks in it, and small tensors that the host changes in its order.

On a CPU there are no streams: what is enqueued is done at once, and every mark is passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torch_eaas.errors import ConfigError, PeerTimeout

LOOK_S = 1e-4
"""Between two looks at a mark; far less than the handshakes and copies that wait for one."""

_ALONE = threading.RLock()
"""Held by who captures, or waits for a whole device: by either at most one in a process."""


def check_device(device: torch.device | str) -> torch.device:
    """Return a device that this process can use, with its number.

    Raises:
        ConfigError: It is neither a CPU nor a GPU that torch finds here.
    """
    found = torch.device(device)
    if found.type == "cpu":
        return found
    if found.type != "cuda":
        raise ConfigError(f"device must be cpu or cuda, got {str(device)!r}")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device is {str(device)!r}, but this torch {torch.__version__} finds no CUDA GPU; "
            f"check nvidia-smi and that torch was built for CUDA, or use device cpu"
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= count:
        raise ConfigError(
            f"device is {str(device)!r}, but torch finds {count} GPUs here: cuda:0 to "
            f"cuda:{count - 1}; check CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", index)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep captures, and waits for a whole device, of this process apart.

    A wait for a device spoils what any thread captures on it, and a capture begins with one.
    """
    with _ALONE:
        yield


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return where this thread's work for a GPU goes, whichever GPU is the current one."""
    return torch.cuda.current_stream(device)


def finish_all(device: torch.device) -> None:
    """Wait until a device has done all that this process gave it, in whatever stream."""
    if device.type == "cuda":
        with undisturbed():
            torch.cuda.synchronize(device)


class Mark:
    """A place in a stream."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    @property
    def is_passed(self) -> bool:
        """Whether everything before it is done."""
        return self._event is None or self._event.query()

    def reach(self) -> None:
        """Sleep until it is passed: every kernel before it ends by itself, in bounded time.

        For whoever must go on at once and has nothing else to do; others ``wait``.
        """
        if self._event is not None:
            self._event.synchronize()

    def wait(self, seconds: float) -> None:
        """Look now and then until it is passed.

        Raises:
            PeerTimeout: It is not passed within ``seconds``.
        """
        end = time.monotonic() + seconds
        while not self.is_passed:
            if time.monotonic() > end:
                raise PeerTimeout(
                    f"a device has not done within {seconds:g} s what it was given before: a "
                    f"kernel hangs; look at nvidia-smi and restart this process"
                )
            time.sleep(LOOK_S)


class DeviceStream:
    """Where one party enqueues its work; it runs in that order.

    Args:
        device: A CPU or a GPU.
        is_first: Whether its kernels go before those of other streams. It is then of another
            priority, so torch hands it to nobody who asks for a usual stream: what spins there
            would keep this one's work from beginning, and what is captured there would take it in.
    """

    def __init__(self, device: torch.device, *, is_first: bool = False) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # torch deals out 32 of each priority, and then the same ones again
            self._stream = torch.cuda.Stream(device, priority=-1 if is_first else 0)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Enqueue here what is launched within."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def follow(self) -> None:
        """Let what is enqueued from now on come after what the caller's stream has by now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def mark(self) -> Mark:
        """Return the place behind what has been enqueued."""
        if self._stream is None:
            return Mark()
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return Mark(event)


def pinned_like(tensor: Tensor) -> Tensor:
    """Return host memory of a tensor's shape that its device copies from and to by itself."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


class Mirror:
    """A small tensor on a device that follows what the host wants.

    Any thread may replace ``wanted``; the thread that enqueues work calls ``push``.

    Args:
        device: The tensor on the device; it is written to, never replaced.
        stream: Where it is read.
    """

    def __init__(self, device: Tensor, stream: DeviceStream) -> None:
        self.device = device
        self.wanted = device.cpu().clone()
        """What the host wants there; to be replaced, never changed."""
        self._pushed = self.wanted
        self._staging = pinned_like(device)
        self._stream = stream
        self._copied = Mark()

    def push(self) -> None:
        """Enqueue a copy, if there is something new."""
        wanted = self.wanted
        if wanted is self._pushed:
            return
        self._copied.reach()
        self._staging.copy_(wanted)
        self.device.copy_(self._staging, non_blocking=True)
        self._copied = self._stream.mark()
        self._pushed = wanted
