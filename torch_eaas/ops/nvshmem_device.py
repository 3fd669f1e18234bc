"""What kernels call of NVSHMEM's device library; linking it takes its bitcode.

A wrong name or argument does not show before ptxas, which refuses what the bitcode does not define.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.language import core

SIGNAL_SET = tl.constexpr(9)
"""NVSHMEM's number for a signal that replaces the word instead of adding to it."""

LIBRARY = "libnvshmem_device"
"""The key under which Triton is given the bitcode's path."""


@core.extern
def put_signal(  # type: ignore[no-untyped-def]
    to, source, num_bytes, word_at, word, operation, pe, _semantic=None
):
    """Put bytes into a PE's memory and then set a word there; the whole block calls it.

    ``to`` and ``word_at`` are symmetric addresses. It returns before the bytes have left: they
    must stay as they are until the peer has answered.

    Args:
        to: Where the bytes go, int64.
        source: Where they lie, int64.
        num_bytes: How many, int64.
        word_at: The word that announces them, int64.
        word: Its new content, int64.
        operation: ``SIGNAL_SET``, int32.
        pe: Whose memory it is, int32.
    """
    i64, i32 = core.dtype("int64"), core.dtype("int32")
    given: dict[Any, Any] = {
        (i64, i64, i64, i64, i64, i32, i32): ("nvshmemx_putmem_signal_nbi_block", i32)
    }
    arguments = [to, source, num_bytes, word_at, word, operation, pe]
    return core.extern_elementwise("", "", arguments, given, is_pure=False, _semantic=_semantic)
