"""What torch and Python keep for each thread, carried over to another one."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

AUTOCAST_DEVICES = ("cpu", "cuda")


class ThreadState:
    """The state of the thread that makes it.

    It holds grad mode, inference mode, autocast, the default device, and context variables. What
    torch keeps for the whole process (the default dtype, the number of threads) needs no carrying.
    """

    def __init__(self) -> None:
        self._variables = contextvars.copy_context()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._is_cache_enabled = torch.is_autocast_cache_enabled()
        self._autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device in AUTOCAST_DEVICES
        ]
        self._device = torch.get_default_device()

    def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what ``work`` returns in this thread, under that state."""

        def under_it() -> R:
            with ExitStack() as stack:
                if self._is_inference:
                    stack.enter_context(torch.inference_mode())
                stack.enter_context(torch.set_grad_enabled(self._is_grad_enabled))
                for device, dtype, is_enabled in self._autocast:
                    if is_enabled:
                        stack.enter_context(
                            torch.autocast(device, dtype, cache_enabled=self._is_cache_enabled)
                        )
                if self._device != torch.get_default_device():
                    stack.enter_context(self._device)
                return work(*args, **kwargs)

        return self._variables.copy().run(under_it)
