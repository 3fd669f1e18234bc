"""Certificates of 127.0.0.1, made for one test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """Return a new certificate of 127.0.0.1, which is its own authority, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes certificates, is not installed")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(
        [*command, "-days", "2", *names, *files, *(more or ["-nodes"])],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return certificate, key
