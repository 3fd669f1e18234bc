"""HTTPS between members and monitor, in the terms of those who serve and call it."""

from __future__ import annotations

import ssl

import httpx

from torch_eaas.access import Access
from torch_eaas.comm.tls import client_context, server_context
from torch_eaas.errors import ConfigError


def check_certificate(access: Access) -> None:
    """Raise ConfigError unless the monitor's certificate and key, if any, can be used."""
    server_context(access, "the monitor")


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
    return client_context(access.tls_authority, "the monitor's")
