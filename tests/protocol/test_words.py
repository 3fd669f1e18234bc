"""The four rules of a word."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_eaas.protocol.words import (
    MAX_SEQUENCE,
    REQUEST,
    RESPONSE,
    is_free,
    is_mine,
    is_newer,
    next_word,
)

sequences = st.integers(0, 2**56 - 2)


def test_the_papers_states_are_one_and_two_and_a_word_begins_as_zero() -> None:
    assert (REQUEST, RESPONSE) == (1, 2)
    words = [0]
    for _ in range(3):
        words.append(next_word(words[-1], REQUEST))
    assert words == [0x000, 0x101, 0x201, 0x301]


@given(sequences, st.sampled_from([0, 1, 2]))
def test_the_next_word_has_the_next_sequence_whatever_the_state_was(n: int, state: int) -> None:
    word = next_word(n * 256 + state, REQUEST)
    assert divmod(word, 256) == (n + 1, REQUEST)
    assert is_newer(word, n * 256 + state)
    assert not is_newer(word, word)
    assert not is_newer(n * 256 + state, word)


@given(sequences, sequences)
def test_only_the_answer_of_the_same_sequence_is_mine(mine: int, other: int) -> None:
    request = mine * 256 + REQUEST
    assert is_mine(mine * 256 + RESPONSE, request)
    assert not is_mine(request, request)
    assert is_mine(other * 256 + RESPONSE, request) == (mine == other)


@given(sequences, sequences)
def test_a_slot_is_free_when_its_last_request_was_answered(asked: int, answered: int) -> None:
    assert is_free(asked * 256 + REQUEST, answered * 256 + RESPONSE) == (asked == answered)


def test_a_slot_that_was_never_used_is_free() -> None:
    assert is_free(0, 0)


def test_the_largest_sequence_still_fits_eight_bytes() -> None:
    word = next_word((MAX_SEQUENCE - 1) << 8 | REQUEST, REQUEST)
    assert word.to_bytes(8, "little") == bytes([REQUEST]) + b"\xff" * 7
