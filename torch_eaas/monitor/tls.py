"""HTTPS between members and monitor: certificates are loaded here, and their faults named."""

from __future__ import annotations

import ssl

import httpx

from torch_eaas.access import Access
from torch_eaas.errors import ConfigError


def check_certificate(access: Access) -> None:
    """Raise ConfigError unless the monitor's certificate and key, if any, can be used."""
    if access.tls_certificate is None or access.tls_key is None:
        return
    try:
        # without a password, else OpenSSL would ask the terminal for that of an encrypted key
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(access.tls_certificate, access.tls_key, lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the monitor cannot use certificate {access.tls_certificate} with key "
            f"{access.tls_key}: {error}; both are PEM files, the key is not encrypted"
        ) from error


def verifier(url: httpx.URL, access: Access) -> ssl.SSLContext | bool:
    """Return what a member verifies the monitor at ``url`` with, as httpx takes it.

    Raises:
        ConfigError: The authority cannot be read, or the URL is not https though there is one.
    """
    if url.scheme != "https":
        if access.tls_authority is not None:
            raise ConfigError(
                f"monitor {url}: is no https, so {access.tls_authority} would verify nothing and "
                f"the token would be sent in the clear; give the https URL or no tls_authority"
            )
        # plain HTTP needs no certificates, which load slowly
        return False
    if access.tls_authority is None:
        return True
    try:
        return ssl.create_default_context(cafile=access.tls_authority)
    except OSError as error:
        raise ConfigError(
            f"cannot read certificates of {access.tls_authority}: {error}; tls_authority is a PEM "
            f"file that verifies the monitor's certificate"
        ) from error
