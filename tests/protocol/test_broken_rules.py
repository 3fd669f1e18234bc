"""Each rule of the protocol, broken, has a counterexample that names the promise it breaks.

The worlds are those of ``test_explored_worlds.py``, as small as the counterexample allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from typing_extensions import override

from tests.protocol.exploring import BrokenPromise, explore
from tests.protocol.modelled import Plan
from tests.protocol.world import World, opened
from torch_eaas.protocol.layout import Status
from torch_eaas.protocol.pairs import ServerEpochs
from torch_eaas.protocol.requests import Fate, Need, Original
from torch_eaas.protocol.slots import ClientSlots, ServerSlots


class ReusesGivenUp(ClientSlots):
    """A book that frees a slot as soon as nobody waits for its answer."""

    @override
    def give_up(self, slot: int) -> None:
        self.release(slot)


class TakesAnyAnswer(ClientSlots):
    """A book to which every answer in a slot is the answer to its last request."""

    @override
    def answered(self, slot: int, response_word: int) -> bool:
        return response_word > 0


class NeverHedges(Original):
    """An original that asks nobody else as long as an answer may come."""

    __slots__ = ()

    @override
    def need(self, now: float) -> Need:
        need = super().need(now)
        return Need.NOTHING if need is Need.HEDGE else need


class CountsAnyHalf(Original):
    """An original to which a part of an alternative is as good as all of it."""

    __slots__ = ()

    @override
    def settle(self) -> bool:
        came = (r for r in self.requests() if r.fate is Fate.ANSWERED)
        self.winner = self.winner or next(([request] for request in came), None)
        return self.winner is not None


class TakesAnyEpoch(ServerEpochs):
    """A memory that lets an old handshake replace a newer window."""

    @override
    def accept(self, instance: int, epoch: int) -> None:
        pass


class CountsFromThisScan(ServerSlots):
    """A book that believes a request to be as fresh as the look that saw it."""

    @override
    def scan(self, words: Sequence[int], now: float) -> None:
        super().scan(self._seen, now)
        super().scan(words, now)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(
            {"word_first": True},
            r"a request's payload is written while the server may read it; after .*land request",
            id="the word before the payload",
        ),
        pytest.param(
            {"asks": 2, "client_book": ReusesGivenUp},
            r"a request's payload is written while the server may read it; after .*deadline 0, tend"
            r" 0,.* ask 0",
            id="a slot reused that was given up",
        ),
        pytest.param(
            {"drops_bad_frames": True, "faults": {"spoil": 1}},
            r"a slot of client 0 at server 0 is lost, for ever; after .*spoil .*, serve [^,]*$",
            id="a bad frame dropped instead of answered",
        ),
        pytest.param(
            {"drops_bad_frames": True, "faults": {"spoil": 1}, "spoiled": Status.BAD_REQUEST},
            r"a slot of client 0 at server 0 is lost, for ever; after .*spoil .*, serve [^,]*$",
            id="a frame that cannot be run dropped instead of answered",
        ),
        pytest.param(
            {"lease_is_death": True, "faults": {"retire": 1}},
            r"a late write lands in memory that was given back; after .*retire .*land reply [^,]*$",
            id="a server's lease taken for its death",
        ),
        pytest.param(
            {"faults": {"lease": 1}},
            r"request 0 of client 0 has not ended, for ever; after .*lease [^,]*$",
            id="a client's lease taken for its death",
        ),
        pytest.param(
            {"resets_words": True},
            r"a slot of client 0 at server 0 is lost, for ever; after .*land reply [^,]*, tend 0$",
            id="a word reset",
        ),
        pytest.param(
            {"asks": 2, "client_book": TakesAnyAnswer},
            r"the sum has \(0, 1, ''\) where it needs \(0, 2, ''\); .*ask 0, read 0 0, finish",
            id="a stale answer accepted",
        ),
        pytest.param(
            {"epochs": TakesAnyEpoch, "faults": {"abandon": 1}},
            r"request 0 of client 0 has not ended, for ever; after .*accept \S*/2, accept \S*/1$",
            id="an old handshake that replaces a newer window",
        ),
        pytest.param(
            {"answers_handshake_early": True, "faults": {"retire": 1}},
            r"a late write lands in memory that was given back; after .*accept \S*/2, land reply",
            id="a handshake answered before the last write into older windows",
        ),
        pytest.param(
            {"server_book": CountsFromThisScan, "faults": {"suspend": 1}},
            r"a server runs what nobody has waited for since long; after .*suspend 0, scan",
            id="a budget that counts from the look that saw the word",
        ),
        pytest.param(
            {"servers": 2, "faults": {"deadline": 0, "hang": 1}, "original": NeverHedges},
            r"request 1 of client 0 has not ended, for ever; after .*hang",
            id="a server that hangs and no hedge",
        ),
        pytest.param(
            {
                "servers": 2,
                "pieces": 1,
                "halves": True,
                "faults": {"deadline": 0, "hedge_time": 0, "spoil": 1},
                "original": CountsAnyHalf,
            },
            r"the sum has \(0, 1, '\w+'\) where it needs",
            id="half an alternative counted for all of it",
        ),
        pytest.param(
            {"servers": 2, "pieces": 2, "sums_all_answers": True},
            r"the sum has \(0, 1, ''\), \(0, 1, ''\) where it needs \(0, 1, ''\); .*finish 0$",
            id="two answers to one request summed",
        ),
    ],
)
def test_each_broken_rule_has_a_counterexample(broken: dict[str, Any], message: str) -> None:
    plan = Plan(**broken)
    with pytest.raises(BrokenPromise, match=message):
        explore(World(plan) if plan.servers == 1 else opened(plan))
