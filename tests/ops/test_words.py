"""The word rules in Triton agree with the protocol's, at every edge."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from torch_eaas.ops.words import is_free, is_mine, is_newer, next_word, response_word, sequence_of
from torch_eaas.protocol import words as rules
from torch_eaas.protocol.slots import ServerSlots

SEQUENCES = (
    0,
    1,
    2,
    0xFF,
    0x100,
    (1 << 24) - 1,
    (1 << 32) - 1,
    1 << 54,
    # from here on the word's highest bit is set
    1 << 55,
    (1 << 55) + 1,
    rules.MAX_SEQUENCE - 1,
    rules.MAX_SEQUENCE,
)
STATES = (0, rules.REQUEST, rules.RESPONSE, 3, 0x7F, 0x80, 0xFF)
WORDS = [sequence << 8 | state for sequence in SEQUENCES for state in STATES]
ALL_BITS = (1 << 64) - 1


pytestmark = pytest.mark.skipif(
    isinstance(next_word, triton.JITFunction),
    reason="kernels run on CPU tensors with TRITON_INTERPRET=1 only",
)


def signed(word: int) -> int:
    """Return the int64 that has a word's bits."""
    return word - (1 << 64) if word >> 63 else word


@triton.jit
def two_words_kernel(a_ptr, b_ptr, mine_ptr, free_ptr, newer_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < count
    a = tl.load(a_ptr + at, mask=is_there, other=0)
    b = tl.load(b_ptr + at, mask=is_there, other=0)
    tl.store(mine_ptr + at, is_mine(a, b).to(tl.int32), mask=is_there)
    tl.store(free_ptr + at, is_free(a, b).to(tl.int32), mask=is_there)
    tl.store(newer_ptr + at, is_newer(a, b).to(tl.int32), mask=is_there)


@triton.jit
def one_word_kernel(word_ptr, next_ptr, answer_ptr, sequence_ptr, STATE: tl.constexpr):
    # a scalar, as the kernels have it
    at = tl.program_id(0)
    word = tl.load(word_ptr + at)
    tl.store(next_ptr + at, next_word(word, STATE))
    tl.store(answer_ptr + at, response_word(word))
    tl.store(sequence_ptr + at, sequence_of(word))


def test_mine_free_and_newer_are_the_protocols_for_every_pair_of_edge_words() -> None:
    pairs = list(itertools.product(WORDS, WORDS))
    a, b = (torch.tensor([signed(pair[i]) for pair in pairs]) for i in range(2))
    mine, free, newer = (torch.full((len(pairs),), -77, dtype=torch.int32) for _ in range(3))
    two_words_kernel[(triton.cdiv(len(pairs), 1024),)](
        a, b, mine, free, newer, len(pairs), BLOCK=1024
    )
    assert mine.tolist() == [int(rules.is_mine(*pair)) for pair in pairs]
    assert free.tolist() == [int(rules.is_free(*pair)) for pair in pairs]
    assert newer.tolist() == [int(rules.is_newer(*pair)) for pair in pairs]
    assert 0 < sum(mine.tolist()) < sum(free.tolist()) < sum(newer.tolist())


def test_the_next_word_and_the_answers_word_are_the_protocols_for_every_edge_word() -> None:
    words = torch.tensor([signed(word) for word in WORDS])
    following, answers, sequences = (torch.full_like(words, -77) for _ in range(3))
    one_word_kernel[(len(WORDS),)](words, following, answers, sequences, STATE=rules.REQUEST)
    # after the largest sequence comes 0: 64 bits have no more
    assert following.tolist() == [
        signed(rules.next_word(word, rules.REQUEST) & ALL_BITS) for word in WORDS
    ]
    assert answers.tolist() == [signed(ServerSlots.reply_word(word)) for word in WORDS]
    assert sequences.tolist() == [word >> 8 for word in WORDS]
