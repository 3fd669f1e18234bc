"""The four rules of a slot's 8-byte word: next, is mine, is free, is newer.

A word is ``sequence << 8 | state``, little-endian, aligned. It has one writer for ever and only
grows; nobody resets it. 0 is a word before its first use.
"""

from __future__ import annotations

REQUEST = 1
"""State of a word that a client wrote: a request lies in the slot."""

RESPONSE = 2
"""State of a word that a server wrote: the answer lies in the slot."""

MAX_SEQUENCE = (1 << 56) - 1


def next_word(word: int, state: int) -> int:
    """Return the word that follows ``word`` in its slot.

    Example:
        ``next_word(0, REQUEST)`` is ``0x101``; ``next_word(0x101, REQUEST)`` is ``0x201``.
    """
    return ((word >> 8) + 1) << 8 | state


def is_mine(word: int, request_word: int) -> bool:
    """Return whether ``word`` answers the request that ``request_word`` announced."""
    return word == (request_word & ~0xFF) | RESPONSE


def is_free(request_word: int, response_word: int) -> bool:
    """Return whether the server has answered the slot's last request.

    The slot may be used again once the client has also read that answer, or has given it up.
    """
    return request_word >> 8 == response_word >> 8


def is_newer(word: int, seen: int) -> bool:
    """Return whether ``word`` announces something after ``seen``."""
    return word > seen
