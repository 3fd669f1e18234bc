"""The seam between what all servers do and how one answers: on the host, or on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeVar

from torch_eaas.protocol.layout import PairSpec


class Pair(Protocol):
    """What the control endpoint must know of one client's windows."""

    peer: int
    """The control connection that it came over."""
    instance: int
    """The client's."""
    epoch: int
    """The number of its windows."""
    is_silent: bool
    """Whether the client may be dead."""


P = TypeVar("P", bound=Pair)


class DataPath(Protocol[P]):
    """How requests become answers.

    The control endpoint sets ``pairs``; one thread calls ``step``, ``rest`` and ``finish``.
    """

    pairs: tuple[P, ...]
    """The pairs to serve; replaced, never changed."""
    agreed: PairSpec | None
    """What every pair must agree on; of slots and tokens a pair may have fewer. None: anything."""
    counters: Counter[str]
    """What was served so far."""
    version: int
    """The newest placement that the server knows, told in each answer."""
    last_answer: float
    """When it last answered, by the server's clock."""
    progress: int
    """Grows as long as it serves."""

    @property
    def make_pair(self) -> Callable[..., P]:
        """What makes a pair of ``peer``, ``client``, ``instance``, ``epoch``, ``spec``, the windows
        ``requests`` and ``replies``, and ``now``."""
        ...

    def step(self) -> int:
        """Serve one batch of what is ready now; return the requests answered."""
        ...

    def rest(self, has_stopped: Callable[[], bool]) -> None:
        """Wait a moment for a request, after a step that had none."""
        ...

    def settle(self) -> None:
        """Return as soon as no pair is written that is not among ``pairs`` now; any thread may."""
        ...

    def finish(self) -> None:
        """Refuse what is there, as a server does that leaves; the last call but ``settle``."""
        ...
