"""Who may ask: a shared token, and the certificates of HTTPS. No repr and no log has the token."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch_eaas.errors import ConfigError

DENIED = (
    "the token is missing or wrong; give this cluster's by --token-file or TORCH_EAAS_TOKEN, "
    "in Python by access=Access(token=...)"
)
"""What a caller is told who is turned away."""

LOG_PAUSE_S = 10.0
"""Callers without the token are told of at most this often: they must not fill the log."""

# what HTTP allows in "Authorization: Bearer"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a process shows to those it calls, and asks of those who call it."""

    token: str = field(default="", repr=False)
    """The cluster's shared secret, the same for all; empty: nobody is asked for one."""

    tls_certificate: Path | None = None
    """This process's certificate chain, PEM; with it a monitor speaks HTTPS only, and a server's
    TCP endpoint TLS only."""

    tls_key: Path | None = None
    """The certificate's private key, PEM, not encrypted."""

    tls_authority: Path | None = None
    """What verifies certificates of the monitor and of servers, PEM; None: the system's list."""

    def __post_init__(self) -> None:
        # the message must not show the token: it ends up in logs
        if self.token and not _TOKEN.fullmatch(self.token):
            raise ConfigError(
                f"a token has 16 to 256 letters, digits or . _ ~ + / = -, this one has "
                f"{len(self.token)} characters; `openssl rand -hex 32` makes one"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError(
                f"tls_certificate and tls_key go together, got {self.tls_certificate} "
                f"and {self.tls_key}"
            )

    def admits(self, token: object) -> bool:
        """Return whether a caller who shows ``token`` may ask; takes the same time for each."""
        if not self.token:
            return True
        # what comes from JSON may be no text, or one that is no Unicode
        given = token.encode(errors="replace") if isinstance(token, str) else b""
        return hmac.compare_digest(given, self.token.encode())


OPEN = Access()
"""Nobody is asked for a token; for one machine whose users trust each other."""


def check_reach(access: Access, address: str, *, who: str, told: str, option: str) -> None:
    """Refuse to let other machines ask without a token; warn if they could read it.

    Args:
        access: What callers must show.
        address: The number of the address that is to be bound.
        who: Who listens, for the messages.
        told: What it was told to listen on.
        option: By which option, on the command line.

    Raises:
        ConfigError: Others reach the address, and there is no token.
    """
    if ipaddress.ip_address(address).is_loopback:
        return
    if not access.token:
        raise ConfigError(
            f"{who} would listen on {told} ({option}), which other machines reach, without a "
            f"token: give one by --token-file or TORCH_EAAS_TOKEN, in Python by "
            f"access=Access(token=...), or bind 127.0.0.1"
        )
    if access.tls_certificate is None:
        logger.warning(
            "%s listens on %s without TLS: who can read this network can read the token; give "
            "--tls-certificate and --tls-key, in Python tls_certificate and tls_key",
            *(who, told),
        )


class Gate:
    """Asks callers for the token; counts and logs those that it turns away. Any thread may use it.

    Args:
        access: What callers must show.
        whom: Who asks, for the log.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, access: Access, whom: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._access = access
        self._whom = whom
        self._clock = clock
        self._lock = threading.Lock()
        self._quiet_until = float("-inf")
        self.denied = 0
        """Calls turned away so far."""

    def admits(self, token: object, caller: str) -> bool:
        """Return whether a call may go on; ``caller`` is who made it, for the log."""
        if self._access.admits(token):
            return True
        with self._lock:
            self.denied += 1
            now, denied = self._clock(), self.denied
            if now < self._quiet_until:
                return False
            self._quiet_until = now + LOG_PAUSE_S
        logger.warning(
            "%s turned away %s: token missing or wrong; %d calls so far", self._whom, caller, denied
        )
        return False
