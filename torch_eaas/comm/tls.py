"""TLS at both ends of a connection: certificates are loaded here, and their faults named."""

from __future__ import annotations

import ssl
from pathlib import Path

from torch_eaas.access import Access
from torch_eaas.errors import ConfigError


def server_context(access: Access, who: str) -> ssl.SSLContext | None:
    """Return what a listener speaks TLS with; None without a certificate.

    Args:
        access: Names the certificate and its key.
        who: Who listens, for the message.

    Raises:
        ConfigError: Certificate or key cannot be used.
    """
    if access.tls_certificate is None or access.tls_key is None:
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # without a password, else OpenSSL would ask the terminal for that of an encrypted key
        context.load_cert_chain(access.tls_certificate, access.tls_key, lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{who} cannot use certificate {access.tls_certificate} with key "
            f"{access.tls_key}: {error}; both are PEM files, the key is not encrypted"
        ) from error
    # nobody resumes a session, and between calls anything to read means that the peer has ended
    context.num_tickets = 0
    return context


def client_context(authority: Path | None, whose: str) -> ssl.SSLContext:
    """Return what verifies a listener's certificate and name.

    Args:
        authority: PEM; None: the system's list.
        whose: Whose certificate it verifies, for the message.

    Raises:
        ConfigError: The authority cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ConfigError(
            f"cannot read certificates of {authority}: {error}; tls_authority is a PEM "
            f"file that verifies {whose} certificate"
        ) from error
