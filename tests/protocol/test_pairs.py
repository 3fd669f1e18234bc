"""Epochs, back-off, retired windows, and what a server remembers of a client's lives."""

from __future__ import annotations

import pytest

from torch_eaas.errors import HandshakeRefused, StalePeer, TransportError
from torch_eaas.protocol import pairs
from torch_eaas.protocol.pairs import ClientPair, ServerEpochs

NOW = 100.0


def test_every_attempt_has_an_epoch_of_its_own_also_after_a_failure() -> None:
    pair = ClientPair()
    first = pair.next_epoch()
    pair.refused(NOW, 0.0)
    second = pair.next_epoch()
    pair.opened(second)
    pair.retire()
    assert [first, second, pair.next_epoch()] == [1, 2, 3]


def test_a_pair_is_open_from_its_handshake_until_its_window_is_retired() -> None:
    pair = ClientPair()
    assert pair.may_open(NOW)
    assert not pair.is_open
    pair.opened(pair.next_epoch())
    assert pair.is_open
    assert not pair.may_open(NOW)
    assert pair.retire() == 1
    assert not pair.is_open
    assert pair.may_open(NOW)


@pytest.mark.parametrize("jitter", [0.0, 0.25, 1.0])
def test_the_pause_doubles_from_50_ms_to_2_s_and_jitter_takes_at_most_half_of_it(
    jitter: float,
) -> None:
    pair = ClientPair()
    full = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    full += [2.0] * 30
    now = NOW
    for pause in full:
        pair.refused(now, jitter)
        least = pause * (0.5 + jitter / 2)
        assert pause / 2 <= least <= pause
        assert not pair.may_open(now + least * 0.999)
        assert pair.may_open(now + least * 1.001)
        now += 10


def test_a_handshake_that_succeeds_starts_the_pauses_anew() -> None:
    pair = ClientPair()
    for _ in range(5):
        pair.refused(NOW, 1.0)
    pair.opened(pair.next_epoch())
    pair.retire()
    pair.refused(NOW, 1.0)
    assert not pair.may_open(NOW + 0.049)
    assert pair.may_open(NOW + 0.051)


def test_windows_that_nothing_comes_through_lengthen_the_pauses_until_something_does() -> None:
    pair = ClientPair()

    def pause(in_vain: bool) -> float:
        pair.opened(pair.next_epoch())
        pair.leave(in_vain=in_vain)
        pair.refused(NOW, 1.0)
        pauses = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0)
        return next(p for p in pauses if pair.may_open(NOW + p * 1.001))

    assert [pause(True) for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert pause(False) == 0.05
    assert pause(True) == 0.1


def test_retiring_a_pair_that_has_no_window_leaves_none_behind() -> None:
    # the data path and the thread that keeps pairs may both find a server lost
    pair = ClientPair()
    pair.opened(pair.next_epoch())
    assert pair.retire() == 1
    assert pair.retire() == 0
    assert pair.may_open(NOW)


def test_a_new_window_ends_suspicion() -> None:
    pair = ClientPair()
    assert not pair.suspect
    assert not pair.heard
    pair.suspect = True
    pair.opened(pair.next_epoch())
    assert not pair.suspect


def test_a_server_accepts_only_an_epoch_above_all_that_it_saw_of_that_instance() -> None:
    epochs = ServerEpochs()
    epochs.accept(0xA, 3)
    for stale in (1, 2, 3):
        with pytest.raises(
            StalePeer, match=rf"client instance 000000000000000a: epoch {stale} is not above 3"
        ):
            epochs.accept(0xA, stale)
    epochs.accept(0xA, 4)
    epochs.accept(0xA, 100)
    # another life of the same client begins anew
    epochs.accept(0xB, 1)
    with pytest.raises(StalePeer, match="epoch 99 is not above 100"):
        epochs.accept(0xA, 99)


@pytest.mark.parametrize("epoch", [0, -1])
def test_epochs_begin_at_one(epoch: int) -> None:
    with pytest.raises(TransportError, match=f"{epoch}"):
        ServerEpochs().accept(0xA, epoch)


def test_a_server_forgets_the_instance_that_it_has_not_seen_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pairs, "MAX_INSTANCES", 2)
    epochs = ServerEpochs()
    for instance, epoch in ((0xA, 5), (0xB, 5), (0xA, 6), (0xC, 5)):
        epochs.accept(instance, epoch)
    for remembered in (0xA, 0xC):
        with pytest.raises(StalePeer, match="epoch 5 is not above"):
            epochs.accept(remembered, 5)
    epochs.accept(0xB, 1)


@pytest.mark.parametrize(
    ("instance", "epoch"), [(2**64, 1), (-1, 1), (1, 2**64)], ids=["large", "negative", "epoch"]
)
def test_numbers_that_no_header_could_echo_are_refused_at_the_handshake(
    instance: int, epoch: int
) -> None:
    epochs = ServerEpochs()
    with pytest.raises(HandshakeRefused, match="must fit 64 bits"):
        epochs.accept(instance, epoch)
    epochs.accept(2**64 - 1, 2**64 - 1)
