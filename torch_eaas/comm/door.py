"""Where a control endpoint takes connections: the seam between it and its kind of socket."""

from __future__ import annotations

import socket
from typing import Protocol


class Door(Protocol):
    """A socket that listens, and who may come in."""

    address: str
    """Where clients call."""

    listening: socket.socket

    is_local: bool
    """Whether only processes of this host come, of the own user: who calls is then no stranger."""

    def take(self, connection: socket.socket) -> socket.socket:
        """Return the connection to talk over; does not block."""
        ...

    def greet(self, connection: socket.socket) -> None:
        """Let it in; PeerGone if it must stay out, before a byte of a frame is read."""
        ...

    def close(self) -> None:
        """Give the address up; nobody waits at the socket any more."""
        ...
