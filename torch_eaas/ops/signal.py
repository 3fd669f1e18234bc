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
from torch_eaas.ops.launching import check_tensor, define_op, on_device
from torch_eaas.ops.pair_table import ClientTables
from torch_eaas.ops.reference_client import Waited, wait_words_ref
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
from torch_eaas.protocol.layout import REPLY_FIELDS, Status

_NOTHING = tl.constexpr(int(Waited.NOTHING))
_ARRIVED = tl.constexpr(int(Waited.ARRIVED))
_TIMED_OUT = tl.constexpr(int(Waited.TIMED_OUT))
_ABORTED = tl.constexpr(int(Waited.ABORTED))
_REFUSED = tl.constexpr(int(Waited.REFUSED))
_STRANGE = tl.constexpr(int(Waited.STRANGE))
_OK = tl.constexpr(int(Status.OK))
_FIELDS = tl.constexpr(len(REPLY_FIELDS))


def wait_replies(
    tables: ClientTables,
    counts_P: Tensor,
    gate: Tensor,
    abort: Tensor,
    *,
    timeout_us: int,
    looks: int,
) -> tuple[Tensor, Tensor]:
    """Wait for the answers of one stage's requests, all in one launch, and read their headers.

    A wait that does not end with a good answer sets the abort word.

    Args:
        tables: The client's pairs; the answer expected is that to the slot's last request word.
        counts_P: Tokens that each pair was sent, ``(P,)`` int32; nobody waits where it is 0.
        gate: The stage's gate, ``(1,)`` int64; if it is not 0, nobody waits.
        abort: The step's abort word, ``(1,)`` int64.
        timeout_us: Microseconds by the GPU's timer; on a CPU the interpreter has none.
        looks: How often to look at most: what ends a wait in the interpreter.

    Returns:
        What became of each wait, ``(P,)`` int32 of ``Waited``, and the headers that came,
        ``(P, F)`` int64 in the order of ``REPLY_FIELDS``, 0 where none came.

    Example:
        Of four pairs one was not asked, one answers and two are silent: ``[0, 1, 2, 3]``.
    """
    return _wait(tables, counts_P, gate, abort, timeout_us, looks, False)


def wait_free(
    tables: ClientTables,
    counts_P: Tensor,
    gate: Tensor,
    abort: Tensor,
    *,
    timeout_us: int,
    looks: int,
) -> Tensor:
    """Wait until the slots that the next requests will take are free; see ``wait_replies``.

    A slot is not free while the answer to a request that was given up has not come.

    Returns:
        What became of each wait, ``(P,)`` int32 of ``Waited``.
    """
    return _wait(tables, counts_P, gate, abort, timeout_us, looks, True)[0]


def _wait(
    tables: ClientTables,
    counts_P: Tensor,
    gate: Tensor,
    abort: Tensor,
    timeout_us: int,
    looks: int,
    for_free: bool,
) -> tuple[Tensor, Tensor]:
    check_tensor("counts_P", counts_P, (torch.int32,), 1)
    check_at_least("timeout_us", timeout_us, 1)
    check_at_least("looks", looks, 1)
    waited_P, replies_PF = _op(
        tables.pairs_PC,
        tables.slots_P,
        tables.words_PS,
        counts_P,
        gate,
        abort,
        timeout_us,
        looks,
        for_free,
    )
    return waited_P, replies_PF


def launch(
    pairs_PC: Tensor,
    slots_P: Tensor,
    words_PS: Tensor,
    counts_P: Tensor,
    gate: Tensor,
    abort: Tensor,
    timeout_us: int,
    looks: int,
    for_free: bool,
) -> tuple[Tensor, Tensor]:
    """Run the kernel: one program a pair."""
    waited_P, replies_PF = _fake(pairs_PC, slots_P, words_PS, counts_P)
    with on_device(pairs_PC):
        _wait_kernel[(len(pairs_PC),)](
            pairs_PC,
            slots_P,
            words_PS,
            counts_P,
            gate,
            abort,
            waited_P,
            replies_PF,
            words_PS.shape[1],
            timeout_us * 1000,
            looks,
            FOR_FREE=for_free,
            HAS_TIMER=isinstance(_wait_kernel, triton.JITFunction),
            num_warps=1,
        )
    return waited_P, replies_PF


def _fake(
    pairs_PC: Tensor, slots_P: Tensor, words_PS: Tensor, counts_P: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(counts_P), pairs_PC.new_empty((len(pairs_PC), len(REPLY_FIELDS)))


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
    pairs_PC: tl.tensor, pair: tl.tensor, slot: tl.tensor, reply_F: tl.tensor
) -> tl.tensor:
    """Copy a reply's header out of the window, each field once, and return what it says."""
    at = reply_slot_at(pairs_PC, pair, slot)
    instance = load_8(at + REPLY_INSTANCE)
    epoch = load_8(at + REPLY_EPOCH)
    status = load_4(at + REPLY_STATUS)
    tl.store(reply_F + 0, instance)
    tl.store(reply_F + 1, epoch)
    tl.store(reply_F + 2, load_8(at + REPLY_SEQUENCE))
    tl.store(reply_F + 3, load_8(at + REPLY_VERSION))
    tl.store(reply_F + 4, status)
    tl.store(reply_F + 5, load_4(at + REPLY_SIZE))
    tl.store(reply_F + 6, load_4(at + REPLY_QUEUE))
    tl.store(reply_F + 7, load_4(at + REPLY_EXPERTS))
    is_ours = instance == of_pair(pairs_PC, pair, INSTANCE)
    is_ours = is_ours & (epoch == of_pair(pairs_PC, pair, EPOCH))
    return tl.where(is_ours, tl.where(status == _OK, _ARRIVED, _REFUSED), _STRANGE)


@triton.jit(do_not_specialize=["num_slots", "timeout_ns", "looks"])
def _wait_kernel(
    pairs_PC: tl.tensor,
    slots_P: tl.tensor,
    words_PS: tl.tensor,
    counts_P: tl.tensor,
    gate: tl.tensor,
    abort: tl.tensor,
    waited_P: tl.tensor,
    replies_PF: tl.tensor,
    num_slots: tl.tensor,
    timeout_ns: tl.tensor,
    looks: tl.tensor,
    FOR_FREE: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    """Wait for one pair's word: each program looks, and ends as ``Waited`` says."""
    pair = tl.program_id(0).to(tl.int64)
    fields = tl.arange(0, _FIELDS)
    tl.store(replies_PF + pair * _FIELDS + fields, tl.zeros((_FIELDS,), tl.int64))
    waited = _NOTHING
    if (tl.load(gate) == 0) & (tl.load(counts_P + pair) > 0):
        slot = tl.load(slots_P + pair)
        request_word = tl.load(words_PS + pair * num_slots + slot)
        start = clock_ns(HAS_TIMER)
        looked = 0
        while waited == _NOTHING:
            looked += 1
            if _look(pairs_PC, pair, slot, request_word, FOR_FREE):
                waited = _ARRIVED
            elif tl.atomic_add(abort, 0, sem="acquire", scope="gpu") != 0:
                waited = _ABORTED
            elif (looked >= looks) | (clock_ns(HAS_TIMER) - start > timeout_ns):
                waited = _TIMED_OUT
        if waited == _ARRIVED and not FOR_FREE:
            # the zeros above are other threads' stores
            tl.debug_barrier()
            waited = _read_header(pairs_PC, pair, slot, replies_PF + pair * _FIELDS)
        if waited != _ARRIVED:
            tl.atomic_xchg(abort, 1, sem="release", scope="gpu")
    tl.store(waited_P + pair, waited)


_op = define_op(
    "wait_words(Tensor pairs_PC, Tensor slots_P, Tensor words_PS, Tensor counts_P, Tensor gate, "
    "Tensor(a!) abort, int timeout_us, int looks, bool for_free) -> (Tensor, Tensor)",
    kernel=launch,
    twin=wait_words_ref,
    fake=_fake,
)
