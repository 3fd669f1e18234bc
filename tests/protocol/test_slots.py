"""Both ends' books on slots: no slot is lost, none has two owners, budgets count from the scan."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torch_eaas.protocol.slots import ClientSlots, ServerSlots

# -- the client's book -------------------------------------------------------------------------


def test_a_slot_goes_from_taken_to_posted_to_answered_to_free() -> None:
    book = ClientSlots(1)
    slot = book.take()
    assert slot == 0
    assert (book.num_free, book.num_in_use, book.num_given_up) == (0, 1, 0)
    assert book.post(0) == 0x101
    assert not book.answered(0, 0)
    assert not book.answered(0, 0x101)
    assert book.answered(0, 0x102)
    book.release(0)
    assert (book.num_free, book.num_in_use, book.num_given_up) == (1, 0, 0)


def test_sequences_count_for_each_slot_alone() -> None:
    book = ClientSlots(2)
    first, second = book.take(), book.take()
    assert {first, second} == {0, 1}
    assert [book.post(0), book.post(0), book.post(1)] == [0x101, 0x201, 0x101]
    assert [book.post(0) >> 8, book.post(1) >> 8] == [3, 2]


@pytest.mark.parametrize("num_slots", [1, 4, 63])
def test_as_many_slots_can_be_taken_as_there_are_and_then_none(num_slots: int) -> None:
    book = ClientSlots(num_slots)
    taken = [book.take() for _ in range(num_slots)]
    assert sorted(slot for slot in taken if slot is not None) == list(range(num_slots))
    assert book.take() is None


def test_an_answer_of_an_earlier_request_is_not_taken_for_the_last_one() -> None:
    book = ClientSlots(1)
    book.take()
    book.post(0)
    book.post(0)
    assert not book.answered(0, 0x102)
    assert book.answered(0, 0x202)


def test_a_slot_that_was_given_up_stays_busy_until_its_late_answer_frees_it() -> None:
    book = ClientSlots(2)
    slot, other = book.take(), book.take()
    assert slot is not None
    assert other is not None
    book.post(slot)
    book.give_up(slot)
    words = [0, 0]
    assert book.reclaim(words) == 0
    assert (book.num_free, book.num_in_use, book.num_given_up) == (0, 1, 1)
    assert book.take() is None
    words[slot] = 0x102
    assert book.reclaim(words) == 1
    assert (book.num_free, book.num_in_use, book.num_given_up) == (1, 1, 0)
    assert book.take() == slot
    assert book.reclaim(words) == 0


def test_a_slot_that_was_given_up_before_its_word_was_posted_is_free_at_once() -> None:
    book = ClientSlots(1)
    book.take()
    book.give_up(0)
    assert book.reclaim([0]) == 1
    book.take()
    book.post(0)
    book.release(0)
    book.take()
    book.give_up(0)
    assert book.reclaim([0x102]) == 1


def test_reclaiming_leaves_slots_alone_whose_answer_somebody_still_reads() -> None:
    book = ClientSlots(1)
    book.take()
    book.post(0)
    assert book.reclaim([0x102]) == 0
    assert book.num_in_use == 1


class AnyOrder(RuleBasedStateMachine):
    """A client that does as it likes, and a server that answers in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.num_slots = 3
        self.book = ClientSlots(self.num_slots)
        self.response_words = [0] * self.num_slots
        self.asked: dict[int, int] = {}
        self.mine: set[int] = set()
        self.given_up: set[int] = set()

    @rule()
    def take_and_post(self) -> None:
        slot = self.book.take()
        if slot is None:
            assert len(self.mine) + len(self.given_up) == self.num_slots
            return
        assert slot not in self.mine | self.given_up
        word = self.book.post(slot)
        assert word > self.response_words[slot]
        self.asked[slot] = word
        self.mine.add(slot)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.asked)))
        self.response_words[slot] = ServerSlots.reply_word(self.asked.pop(slot))

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def read_or_wait(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.mine)))
        has_come = slot not in self.asked
        assert self.book.answered(slot, self.response_words[slot]) == has_come
        if has_come:
            self.mine.remove(slot)
            self.book.release(slot)

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.mine)))
        self.mine.remove(slot)
        self.given_up.add(slot)
        self.book.give_up(slot)

    @rule()
    def reclaim(self) -> None:
        late = {slot for slot in self.given_up if slot not in self.asked}
        assert self.book.reclaim(self.response_words) == len(late)
        self.given_up -= late

    @invariant()
    def every_slot_is_in_exactly_one_place(self) -> None:
        assert self.book.num_in_use == len(self.mine)
        assert self.book.num_given_up == len(self.given_up)
        assert self.book.num_free == self.num_slots - len(self.mine) - len(self.given_up)

    def teardown(self) -> None:
        for slot in list(self.asked):
            self.response_words[slot] = ServerSlots.reply_word(self.asked.pop(slot))
        self.book.reclaim(self.response_words)
        for slot in self.mine:
            assert self.book.answered(slot, self.response_words[slot])
            self.book.release(slot)
        assert self.book.num_free == self.num_slots


TestNoSlotIsLostAndNoneHasTwoOwners = AnyOrder.TestCase
TestNoSlotIsLostAndNoneHasTwoOwners.settings = hypothesis.settings(
    max_examples=60, stateful_step_count=40
)

# -- the server's book -------------------------------------------------------------------------


def test_each_new_word_is_served_once_in_the_order_it_was_seen() -> None:
    book = ServerSlots(3, now=0.0)
    book.scan([0, 0, 0], 1.0)
    assert book.num_ready == 0
    book.scan([0, 0x101, 0], 2.0)
    book.scan([0x101, 0x101, 0], 3.0)
    book.scan([0x101, 0x101, 0], 4.0)
    assert book.num_ready == 2
    assert book.peek() == book.take() == (1, 0x101, 1.0)
    assert book.take() == (0, 0x101, 2.0)
    assert book.num_ready == 0
    book.scan([0x201, 0x101, 0], 5.0)
    assert book.take() == (0, 0x201, 4.0)


def test_a_budget_counts_from_the_scan_before_the_one_that_saw_the_word() -> None:
    book = ServerSlots(1, now=10.0)
    book.scan([0], 11.0)
    # the server is suspended here, and cannot know when the word came
    book.scan([0x101], 500.0)
    assert book.take() == (0, 0x101, 11.0)


def test_the_budget_of_a_windows_first_request_counts_from_the_handshake() -> None:
    book = ServerSlots(1, now=10.0)
    book.scan([0x101], 12.0)
    assert book.take() == (0, 0x101, 10.0)


def test_a_word_that_does_not_grow_is_not_served_again() -> None:
    book = ServerSlots(2, now=0.0)
    book.scan([0x501, 0x101], 1.0)
    book.take()
    book.take()
    for words in ([0x501, 0x101], [0x401, 0x101], [0, 0], [0x500, 0x100]):
        book.scan(words, 2.0)
    assert book.num_ready == 0


def test_a_client_that_overwrites_its_own_word_is_served_the_newest_and_holds_one_place() -> None:
    # it breaks the protocol, and must not make the server's list grow
    book = ServerSlots(2, now=0.0)
    for sequence in range(1, 1000):
        book.scan([sequence << 8 | 1, 0x101], float(sequence))
    assert book.num_ready == 2
    assert {book.take()[:2], book.take()[:2]} == {(0, 999 << 8 | 1), (1, 0x101)}


@pytest.mark.parametrize("word", [0x101, 0x1FF01, (2**56 - 1) << 8 | 1])
def test_a_reply_word_has_the_requests_sequence_and_state_two(word: int) -> None:
    assert divmod(ServerSlots.reply_word(word), 256) == (word >> 8, 2)
