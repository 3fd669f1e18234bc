"""Options that say who may ask: where the token lies, and the certificates."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from torch_eaas.access import Access
from torch_eaas.cli.environment import TOKEN, token_of
from torch_eaas.errors import ConfigError

_OTHERS = 0o007


def add_token(parser: ArgumentParser) -> None:
    """Declare the token's option; the token itself is none, since ``ps`` shows those to all."""
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"holds the cluster's token, unreadable to others; else {TOKEN} is taken",
    )


def add_certificate(parser: ArgumentParser) -> None:
    """Declare the options of the monitor's own certificate."""
    parser.add_argument(
        "--tls-certificate",
        type=Path,
        metavar="FILE",
        help="certificate chain, PEM: the monitor then speaks HTTPS only",
    )
    parser.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="the certificate's key, PEM, not encrypted"
    )


def add_authority(parser: ArgumentParser) -> None:
    """Declare the option of those who call the monitor."""
    parser.add_argument(
        "--tls-authority",
        type=Path,
        metavar="FILE",
        help="verifies the monitor's certificate, PEM (the system's authorities)",
    )


def access_of(args: Namespace) -> Access:
    """Return what the options and the environment say.

    Raises:
        ConfigError: The token's file cannot be used, or the options contradict each other.
    """
    return Access(
        token=token_of() if args.token_file is None else read_token(args.token_file),
        tls_certificate=getattr(args, "tls_certificate", None),
        tls_key=getattr(args, "tls_key", None),
        tls_authority=getattr(args, "tls_authority", None),
    )


def read_token(path: Path, named: str = "--token-file") -> str:
    """Return the token that a file holds.

    Args:
        path: The file.
        named: What names it, for the messages.

    Raises:
        ConfigError: It cannot be read, holds none, or every user could use it.
    """
    try:
        mode = path.stat().st_mode & 0o777
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"{named} {path}: {error.strerror}") from error
    except ValueError:
        # not the error's own text: it shows what was read
        raise ConfigError(f"{named} {path}: is no text of ASCII characters") from None
    if mode & _OTHERS:
        raise ConfigError(
            f"{named} {path}: every user may use it (mode {mode:04o}), so it is no secret; "
            f"make a new token and `chmod 600 {path}`"
        )
    if not token:
        raise ConfigError(f"{named} {path}: is empty; `openssl rand -hex 32` makes a token")
    return token
