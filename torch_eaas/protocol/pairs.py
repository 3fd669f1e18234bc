"""What both ends remember of a pair: epochs, suspicion, retired windows, back-off."""

from __future__ import annotations

from torch_eaas.errors import HandshakeRefused, StalePeer
from torch_eaas.protocol.hedging import Latencies

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
MAX_INSTANCES = 1 << 16
"""Lives of clients that a server remembers: 6 MB, where each ever met would be a leak."""

_TOO_LARGE = 1 << 64


class ClientPair:
    """A client's view of one server: its epochs, and whether to ask it.

    A server is *suspect* for this client after it was late or lost; it is still asked when nobody
    else holds an expert. Suspicion ends when anything of it is heard, or a new window opens.

    At most one window lies retired at a time: the server's answer to a handshake says that it
    writes into no older window any more.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self.open_epoch = 0
        """The window in use, 0 for none."""
        self._failures = 0
        self._in_vain = 0
        self._retry_at = 0.0
        self.suspect = False
        self.heard = False
        """Whether the server has ever answered a request: its first may take longer."""
        self.heard_at = 0.0
        """When it last answered one: of suspects, the one heard from last is asked first."""
        self.latencies = Latencies()

    @property
    def is_open(self) -> bool:
        """Whether a window of this pair is in use."""
        return self.open_epoch > 0

    def may_open(self, now: float) -> bool:
        """Return whether a handshake may be tried now."""
        return not self.is_open and now >= self._retry_at

    def next_epoch(self) -> int:
        """Return the epoch of the next attempt; each attempt has its own, also after a failure."""
        self._epoch += 1
        return self._epoch

    def opened(self, epoch: int) -> None:
        """Note that the window of ``epoch`` is in use; the server has closed all lower ones."""
        self.open_epoch = epoch
        self._failures = 0
        self.suspect = False

    def refused(self, now: float, jitter: float) -> None:
        """Note a failed attempt; ``jitter`` in 0 to 1 spreads the next ones of many clients."""
        pause = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self._failures + self._in_vain))
        self._failures = min(self._failures + 1, 16)
        self._retry_at = now + pause * (0.5 + jitter / 2)

    def retire(self) -> int:
        """Stop using the open window and return its epoch.

        Without an open window it returns 0: two threads may find the same server lost.
        """
        epoch, self.open_epoch = self.open_epoch, 0
        return epoch

    def leave(self, *, in_vain: bool) -> None:
        """Stop using the open window: its server is late beyond all patience, or gone.

        ``in_vain``: nothing has come through it. Handshakes of such a server prove little, so the
        pauses before them grow as if they had failed.
        """
        self._in_vain = min(self._in_vain + 1, 16) if in_vain else 0
        self.retire()


class ServerEpochs:
    """A server's memory of the epochs that it saw: only a higher one opens a window.

    It keeps one number for each client instance, and forgets the one that it has not seen for
    longest once there are more than ``MAX_INSTANCES``.
    """

    def __init__(self) -> None:
        self._highest: dict[int, int] = {}

    def accept(self, instance: int, epoch: int) -> None:
        """Note a handshake.

        Raises:
            StalePeer: The epoch is not above all that this server saw of that client instance.
            HandshakeRefused: A number has more bits than a header's field.
        """
        if not (0 <= instance < _TOO_LARGE and epoch < _TOO_LARGE):
            raise HandshakeRefused(
                f"instance and epoch must fit 64 bits, got instance {instance:x}, epoch {epoch}"
            )
        highest = self._highest.get(instance, 0)
        if epoch <= highest:
            raise StalePeer(
                f"client instance {instance:016x}: epoch {epoch} is not above {highest}, "
                f"the newest that this server saw; open the pair with a new epoch"
            )
        # last in the order in which a dict keeps its keys
        self._highest.pop(instance, None)
        self._highest[instance] = epoch
        if len(self._highest) > MAX_INSTANCES:
            del self._highest[next(iter(self._highest))]
