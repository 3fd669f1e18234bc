"""A thread that is given another's state has it, and only while it works."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from torch_eaas.thread_state import ThreadState

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


def state() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.empty(1).device,
        "dtype": torch.empty(1).dtype,
        "threads": torch.get_num_threads(),
        "variable": VARIABLE.get(),
    }


def in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(10)
    return found[0]


def default_dtype() -> AbstractContextManager[Any]:
    from contextlib import contextmanager

    @contextmanager
    def half() -> Any:
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(torch.float32)

    return half()


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        lambda: torch.device("meta"),
        default_dtype,
    ],
    ids=["no_grad", "grad", "inference", "bf16", "fp16", "device", "dtype"],
)
def test_the_other_thread_has_this_ones_state(context: Callable[[], Any]) -> None:
    before = in_thread(state)
    with context():
        VARIABLE.set("mine")
        mine = state()
        carried = ThreadState()
        with_it, after = in_thread(lambda: (carried.run(state), state()))
    assert with_it == mine
    if context is not default_dtype:
        assert after == before
    VARIABLE.set("unset")


def test_what_one_thread_sets_no_other_sees() -> None:
    carried = ThreadState()

    def change() -> None:
        VARIABLE.set("theirs")
        torch.set_grad_enabled(False)

    in_thread(lambda: carried.run(change))
    assert (VARIABLE.get(), torch.is_grad_enabled()) == ("unset", True)


def test_arguments_and_errors_pass() -> None:
    assert ThreadState().run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        ThreadState().run(divmod, 7, 0)
