"""Triton helpers: the tokens that slots really hold, numbered without gaps.

S slots have room for T tokens each and hold fewer, most of them none. A kernel walks over the
tokens that are there; these functions say which row each of them is.

Shape suffixes: S slots, T tokens that a slot has room for, P numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_counts(
    num_tokens_S: tl.tensor, slots: tl.tensor, num_slots: tl.tensor, room: tl.tensor
) -> tl.tensor:
    """Return how many tokens slots hold: none beyond the last slot, and never more than fit."""
    counts = tl.load(num_tokens_S + slots, mask=slots < num_slots, other=0)
    return tl.minimum(tl.maximum(counts, 0), room)


@triton.jit
def find_slot(numbers_P: tl.tensor, ends_S: tl.tensor) -> tl.tensor:
    """Return the slot of each number, and how many numbers the slots before it have.

    Args:
        numbers_P: Numbers below the last of ``ends_S``.
        ends_S: Running sum of what each slot has.

    Example:
        Slots with 2, 0 and 3 have ``ends=[2, 2, 5]``: number 1 lies in slot 0 behind none, number
        2 in slot 2 behind 2.
    """
    is_before_PS = ends_S[None, :] <= numbers_P[:, None]
    slots_P = tl.sum(is_before_PS.to(tl.int32), axis=1)
    return slots_P, tl.max(tl.where(is_before_PS, ends_S[None, :], 0), axis=1)


@triton.jit
def find_tokens(numbers_P: tl.tensor, ends_S: tl.tensor, room: tl.tensor) -> tl.tensor:
    """Return the row, ``slot * T + token``, of each of the tokens that are there."""
    slots_P, begins_P = find_slot(numbers_P, ends_S)
    return slots_P * room + numbers_P - begins_P
