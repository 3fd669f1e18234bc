"""Waiting for peers' words on the GPU: one launch, whatever the number of servers.

Whoever waits ends: with the word, at the deadline, or when another wait of the same step has given
up and set the step's abort word; see ``gate``.

Shape suffixes: see ``pair_table``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.config import check_at_least
from torch_eaas.ops.clock import clock_ns
from torch_eaas.ops.gate import close_gate, set_abort
from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.pair_table import ClientTables
from torch_eaas.ops.reference_client import WAIT_FAILED, Outcome, Waited, wait_words_ref
from torch_eaas.ops.windows import (
    EPOCH,
    INSTANCE,
    REPLIES,
    REPLY_EPOCH,
    REPLY_EXPERTS,
    REPLY_INSTANCE,
    REPLY_QUEUE,
    REPLY_SEQUENCE,
    REPLY_SIZE,
    REPLY_STATUS,
    REPLY_VERSION,
    load_4,
    load_8,
    of_pair,
    reply_slot_at,
    word_at,
)
from torch_eaas.ops.words import is_free, is_mine, load_word
from torch_eaas.protocol.layout import Status

_NOTHING = tl.constexpr(int(Waited.NOTHING))
_ARRIVED = tl.constexpr(int(Waited.ARRIVED))
_TIMED_OUT = tl.constexpr(int(Waited.TIMED_OUT))
_ABORTED = tl.constexpr(int(Waited.ABORTED))
_REFUSED = tl.constexpr(int(Waited.REFUSED))
_STRANGE = tl.constexpr(int(Waited.STRANGE))
_OK = tl.constexpr(int(Status.OK))
_FAILED = tl.constexpr(WAIT_FAILED)
_COLUMNS = tl.constexpr(len(Outcome))
_NEXT_POWER = tl.constexpr(triton.next_power_of_2(len(Outcome)))
_WAITED = tl.constexpr(int(Outcome.WAITED))
_LAYER = tl.constexpr(int(Outcome.LAYER))
_INSTANCE = tl.constexpr(int(Outcome.INSTANCE))
_EPOCH = tl.constexpr(int(Outcome.EPOCH))
_SEQUENCE = tl.constexpr(int(Outcome.SEQUENCE))
_VERSION = tl.constexpr(int(Outcome.VERSION))
_STATUS = tl.constexpr(int(Outcome.STATUS))
_SIZE = tl.constexpr(int(Outcome.SIZE))
_QUEUE = tl.constexpr(int(Outcome.QUEUE_US))
_EXPERTS = tl.constexpr(int(Outcome.EXPERTS_US))


def wait_replies(
    tables: ClientTables,
    counts_P: Tensor,
    gate: Tensor,
    arrivals_P: Tensor,
    abort: Tensor,
    outcomes_PO: Tensor,
    *,
    layer: int,
    timeout_us: int,
    looks: int,
) -> None:
    """Wait for the answers of one stage's requests, all in one launch, and read their headers.

    A wait that does not end with a good answer sets the abort word, unless it is set already.

    Args:
        tables: The client's pairs; the answer expected is that to the slot's last request word.
        counts_P: Tokens that each pair was sent, ``(P,)`` int32; nobody waits where it is 0.
        gate: The micro-batch's gate, ``(1,)`` int64; if it is not 0, nobody waits. Once all waits
            have ended, it is what the abort word is: so the stages behind this one may run, or not.
        arrivals_P: Counters, int32, 0 before and after; one is used.
        abort: The step's abort word, ``(1,)`` int64.
        outcomes_PO: What became of each pair's last wait, ``(P, O)`` int64 in the order of
            ``Outcome``. The rows of pairs that nobody waits for stay as they are: after a step that
            failed they tell which pair did, how, and in which layer.
        layer: The layer, noted there.
        timeout_us: Microseconds by the GPU's timer; on a CPU the interpreter has none.
        looks: How often to look at most: what ends a wait in the interpreter.

    Example:
        Of four pairs one was not asked, one answers and two are silent; the first column was 0 and
        becomes ``[0, 1, 2, 3]``.
    """
    _wait(tables, counts_P, gate, arrivals_P, abort, outcomes_PO, layer, timeout_us, looks, False)


def wait_free(
    tables: ClientTables,
    counts_P: Tensor,
    gate: Tensor,
    arrivals_P: Tensor,
    abort: Tensor,
    outcomes_PO: Tensor,
    *,
    layer: int,
    timeout_us: int,
    looks: int,
) -> None:
    """Wait until the slots that the next requests will take are free; see ``wait_replies``.

    A slot is not free while the answer to a request that was given up has not come. Outcomes are
    written where a wait failed.
    """
    _wait(tables, counts_P, gate, arrivals_P, abort, outcomes_PO, layer, timeout_us, looks, True)


def _wait(
    tables: ClientTables,
    counts_P: Tensor,
    gate: Tensor,
    arrivals_P: Tensor,
    abort: Tensor,
    outcomes_PO: Tensor,
    layer: int,
    timeout_us: int,
    looks: int,
    for_free: bool,
) -> None:
    check_tensor("counts_P", counts_P, (torch.int32,), 1)
    check_tensor("arrivals_P", arrivals_P, (torch.int32,), 1)
    check_tensor("outcomes_PO", outcomes_PO, (torch.int64,), 2)
    check_at_least("timeout_us", timeout_us, 1)
    check_at_least("looks", looks, 1)
    _op(
        tables.pairs_PC,
        tables.slots_P,
        tables.words_PS,
        counts_P,
        gate,
        arrivals_P,
        abort,
        outcomes_PO,
        layer,
        timeout_us,
        looks,
        for_free,
    )


def launch(
    pairs_PC: Tensor,
    slots_P: Tensor,
    words_PS: Tensor,
    counts_P: Tensor,
    gate: Tensor,
    arrivals_P: Tensor,
    abort: Tensor,
    outcomes_PO: Tensor,
    layer: int,
    timeout_us: int,
    looks: int,
    for_free: bool,
) -> None:
    """Run the kernel: one program a pair."""
    with on_device(pairs_PC):
        _wait_kernel[(len(pairs_PC),)](
            pairs_PC,
            slots_P,
            words_PS,
            counts_P,
            gate,
            arrivals_P,
            abort,
            outcomes_PO,
            words_PS.shape[1],
            layer,
            timeout_us * 1000,
            looks,
            FOR_FREE=for_free,
            HAS_TIMER=isinstance(_wait_kernel, triton.JITFunction),
            num_warps=1,
        )


@triton.jit
def _look(
    pairs_PC: tl.tensor,
    pair: tl.tensor,
    slot: tl.tensor,
    request_word: tl.tensor,
    FOR_FREE: tl.constexpr,
) -> tl.tensor:
    """Return whether the word that is waited for has come."""
    word = load_word(word_at(pairs_PC, pair, slot, REPLIES))
    # the rule not taken is not compiled
    return is_free(request_word, word) if FOR_FREE else is_mine(word, request_word)


@triton.jit
def _read_header(
    pairs_PC: tl.tensor, pair: tl.tensor, slot: tl.tensor, outcome_O: tl.tensor
) -> tl.tensor:
    """Copy a reply's header out of the window, each field once, and return what it says."""
    at = reply_slot_at(pairs_PC, pair, slot)
    instance = load_8(at + REPLY_INSTANCE)
    epoch = load_8(at + REPLY_EPOCH)
    status = load_4(at + REPLY_STATUS)
    tl.store(outcome_O + _INSTANCE, instance)
    tl.store(outcome_O + _EPOCH, epoch)
    tl.store(outcome_O + _SEQUENCE, load_8(at + REPLY_SEQUENCE))
    tl.store(outcome_O + _VERSION, load_8(at + REPLY_VERSION))
    tl.store(outcome_O + _STATUS, status)
    tl.store(outcome_O + _SIZE, load_4(at + REPLY_SIZE))
    tl.store(outcome_O + _QUEUE, load_4(at + REPLY_QUEUE))
    tl.store(outcome_O + _EXPERTS, load_4(at + REPLY_EXPERTS))
    is_ours = instance == of_pair(pairs_PC, pair, INSTANCE)
    is_ours = is_ours & (epoch == of_pair(pairs_PC, pair, EPOCH))
    return tl.where(is_ours, tl.where(status == _OK, _ARRIVED, _REFUSED), _STRANGE)


@triton.jit(do_not_specialize=["num_slots", "layer", "timeout_ns", "looks"])
def _wait_kernel(
    pairs_PC: tl.tensor,
    slots_P: tl.tensor,
    words_PS: tl.tensor,
    counts_P: tl.tensor,
    gate: tl.tensor,
    arrivals_P: tl.tensor,
    abort: tl.tensor,
    outcomes_PO: tl.tensor,
    num_slots: tl.tensor,
    layer: tl.tensor,
    timeout_ns: tl.tensor,
    looks: tl.tensor,
    FOR_FREE: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    """Wait for one pair's word: each program looks, and ends as ``Waited`` says."""
    pair = tl.program_id(0).to(tl.int64)
    outcome_O = outcomes_PO + pair * _COLUMNS
    if (tl.load(gate) == 0) & (tl.load(counts_P + pair) > 0):
        slot = tl.load(slots_P + pair)
        request_word = tl.load(words_PS + pair * num_slots + slot)
        start = clock_ns(HAS_TIMER)
        looked = 0
        waited = _NOTHING
        while waited == _NOTHING:
            looked += 1
            if _look(pairs_PC, pair, slot, request_word, FOR_FREE):
                waited = _ARRIVED
            elif tl.atomic_add(abort, 0, sem="acquire", scope="gpu") != 0:
                waited = _ABORTED
            elif (looked >= looks) | (clock_ns(HAS_TIMER) - start > timeout_ns):
                waited = _TIMED_OUT
        if waited != _ARRIVED or not FOR_FREE:
            column = tl.arange(0, _NEXT_POWER)
            blank = tl.zeros((_NEXT_POWER,), tl.int64)
            tl.store(outcome_O + column, blank, mask=column < _COLUMNS)
            # those are other threads' stores
            tl.debug_barrier()
            if waited == _ARRIVED:
                waited = _read_header(pairs_PC, pair, slot, outcome_O)
            tl.store(outcome_O + _WAITED, waited)
            tl.store(outcome_O + _LAYER, layer)
        if waited != _ARRIVED:
            set_abort(abort, tl.full((), _FAILED, tl.int64))
    close_gate(abort, gate, arrivals_P)


_op = define_op(
    "wait_words(Tensor pairs_PC, Tensor slots_P, Tensor words_PS, Tensor counts_P, "
    "Tensor(a!) gate, Tensor(b!) arrivals_P, Tensor(c!) abort, Tensor(d!) outcomes_PO, "
    "int layer, int timeout_us, int looks, bool for_free) -> ()",
    kernel=launch,
    twin=wait_words_ref,
    fake=lambda *_: None,
)
