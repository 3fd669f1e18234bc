"""What the tests of every folder may use."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.configuration
import pytest

# the same examples at each run, and no folder left beside the sources
hypothesis.configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "eaas-hypothesis")
hypothesis.settings.register_profile("eaas", database=None, derandomize=True, deadline=None)
hypothesis.settings.load_profile("eaas")


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Put the log level back that the command line, called in this process, may have set."""
    ours = logging.getLogger("torch_eaas")
    before = ours.level
    yield
    ours.setLevel(before)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch leaves unwritten with NaN or huge integers, so that reading it shows."""
    import torch

    def poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor if tensor.dtype is torch.bool else tensor.fill_(-77)

        return wrapper

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Begin with one thread for products; a test may change that, and it is put back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
