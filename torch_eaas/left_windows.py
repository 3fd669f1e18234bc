"""Windows that a client has left while their server may still write into them.

A write that is under way cannot be recalled. So the memory stays as it is, and nobody looks there,
until the server can write no more: its process or connection has ended, or it has opened a later
window of the pair, for which it closes the earlier ones first.
"""

from __future__ import annotations

import atexit
import threading

from torch_eaas.comm.transport import Link
from torch_eaas.open_pair import OpenPair


class LeftWindows:
    """The pairs whose windows a client has left, each with its memory; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: list[OpenPair] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, pair: OpenPair) -> None:
        """Keep a pair's windows until its server can write there no more."""
        with self._lock:
            self._pairs.append(pair)

    def holds_up(self, instance: int) -> bool:
        """Return whether a server's next pair must wait until its memory is not in use here."""
        with self._lock:
            return any(_is_used(pair) and pair.server.instance == instance for pair in self._pairs)

    def forget_harmless(self) -> list[Link]:
        """Let go of the windows that nobody writes any more; return their links, to be closed."""
        with self._lock:
            harmless = [pair for pair in self._pairs if _is_harmless(pair)]
            self._pairs = [pair for pair in self._pairs if pair not in harmless]
        return [pair.link for pair in harmless]

    def close(self) -> list[Link]:
        """Return all links, to be closed; what may be written stays until the process ends."""
        links = self.forget_harmless()
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            # what is called at exit is kept until then
            atexit.register(_keep, pair)
        return links + [pair.link for pair in pairs]


def _is_used(pair: OpenPair) -> bool:
    """Return whether this process still uses memory that the next pair would get too."""
    return pair.is_bound and pair.num_in_use > 0


def _is_harmless(pair: OpenPair) -> bool:
    if _is_used(pair):
        # a connection between hosts may have been cut while its server lives
        return False
    has_ended = pair.link.closed and not pair.was_cut
    return has_ended or pair.pair.open_epoch > pair.epoch


def _keep(pair: OpenPair) -> None:
    """Do nothing."""
