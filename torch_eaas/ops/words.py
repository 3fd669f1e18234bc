"""The four rules of a slot's word in Triton, and how a kernel loads and stores one.

``protocol/words.py`` is their twin. Words lie in int64 tensors; their 64 bits are unsigned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_eaas.protocol import words as rules

REQUEST = tl.constexpr(rules.REQUEST)
RESPONSE = tl.constexpr(rules.RESPONSE)


@triton.jit
def sequence_of(word: tl.tensor) -> tl.tensor:
    """Return a word's sequence number."""
    return (word.to(tl.uint64, bitcast=True) >> 8).to(tl.int64, bitcast=True)


@triton.jit
def next_word(word: tl.tensor, state: tl.constexpr) -> tl.tensor:
    """Return the word that follows ``word`` in its slot."""
    return ((sequence_of(word) + 1) << 8) | state


@triton.jit
def response_word(request_word: tl.tensor) -> tl.tensor:
    """Return the word that answers ``request_word``."""
    return (sequence_of(request_word) << 8) | RESPONSE


@triton.jit
def is_mine(word: tl.tensor, request_word: tl.tensor) -> tl.tensor:
    """Return whether ``word`` answers the request that ``request_word`` announced."""
    return word == response_word(request_word)


@triton.jit
def is_free(request_word: tl.tensor, reply_word: tl.tensor) -> tl.tensor:
    """Return whether the server has answered the slot's last request."""
    return sequence_of(request_word) == sequence_of(reply_word)


@triton.jit
def is_newer(word: tl.tensor, seen: tl.tensor) -> tl.tensor:
    """Return whether ``word`` announces something after ``seen``."""
    return word.to(tl.uint64, bitcast=True) > seen.to(tl.uint64, bitcast=True)


@triton.jit
def load_word(address: tl.tensor) -> tl.tensor:
    """Load one word that a peer stores: what it announces is visible to this block afterwards.

    Adding 0 is what both the compiler and the interpreter have; it compiles to a plain load with
    acquire order at system scope. That holds for one word, not for a tensor of them.
    """
    return tl.atomic_add(address.to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")


@triton.jit
def store_word(address: tl.tensor, word: tl.tensor) -> None:
    """Store one word; what this block wrote before is visible to whoever loads it."""
    # the release is one thread's: the others' stores must come before it
    tl.debug_barrier()
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int64)), word, sem="release", scope="sys")
