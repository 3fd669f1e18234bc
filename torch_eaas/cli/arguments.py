"""Values of options that argparse has no type for; a wrong one is an error of usage."""

from argparse import ArgumentParser, ArgumentTypeError
from datetime import timedelta

from torch_eaas.comm.auto import AUTO, BETWEEN_PROCESSES


def add_transport(parser: ArgumentParser) -> None:
    """Declare the option of what reaches a peer's windows."""
    parser.add_argument(
        "--transport",
        choices=BETWEEN_PROCESSES,
        default=AUTO,
        help="how clients and servers reach each other, the same at both ends (%(default)s)",
    )


def count(text: str) -> int:
    """Return an integer of at least 1."""
    return _integer(text, 1, None)


def seed(text: str) -> int:
    """Return an integer of at least 0."""
    return _integer(text, 0, None)


def port(text: str) -> int:
    """Return a TCP port, 0 for a free one."""
    return _integer(text, 0, 65535)


def seconds(text: str) -> timedelta:
    """Return a duration above zero."""
    return timedelta(seconds=positive(text))


def positive(text: str) -> float:
    """Return a number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # a day's worth of seconds, say: infinity and NaN are no durations
    if not 0 < value < 1e9:
        raise ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def device(text: str) -> str:
    """Return ``cpu``, ``cuda`` or ``cuda:N``."""
    kind, colon, number = text.partition(":")
    if text in ("cpu", "cuda") or (kind == "cuda" and colon and number.isdecimal()):
        return text
    raise ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")


def share(text: str) -> tuple[int, int]:
    """Return index and count of ``INDEX/COUNT``.

    Example:
        ``"0/3"`` gives ``(0, 3)``.
    """
    index, slash, total = text.partition("/")
    if slash and index.isdecimal() and total.isdecimal() and int(index) < int(total):
        return int(index), int(total)
    raise ArgumentTypeError(f"must be INDEX/COUNT with INDEX from 0 to COUNT - 1, got {text!r}")


def expert_ids(text: str) -> tuple[int, ...]:
    """Return the ids of a list of numbers and ranges, ascending.

    Example:
        ``"12,0-2"`` gives ``(0, 1, 2, 12)``.
    """
    ids: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 1 << 16):
            raise ArgumentTypeError(f"must be numbers and ranges like 0-7,12, got {text!r}")
        ids.update(range(int(first), int(last) + 1))
    return tuple(sorted(ids))


def _integer(text: str, least: int, most: int | None) -> int:
    digits = text.removeprefix("-")
    value = int(text) if digits.isdecimal() else least - 1
    if value < least or (most is not None and value > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ArgumentTypeError(f"must be an integer {limit}, got {text!r}")
    return value
