"""The plain twins of the ops of a server's data path, built on the protocol's own rules.

Shape suffixes: see ``pair_table``.
"""

from __future__ import annotations

import time
from collections import Counter

import torch
from torch import Tensor

from torch_eaas.ops.pair_memory import PairMemory, copy_bits
from torch_eaas.ops.pair_table import Column, signed, unsigned
from torch_eaas.protocol.layout import (
    HEADER_BYTES,
    REPLY_HEADER,
    REQUEST_FIELDS,
    REQUEST_HEADER,
    Status,
)
from torch_eaas.protocol.slots import ServerSlots
from torch_eaas.protocol.words import is_newer

NO_REQUEST = -1
"""Stands where a request's status would."""

_LONGEST_TIME = (1 << 32) - 1


def read_clock_ref(now: Tensor) -> None:
    """Define ``clock.read_clock``."""
    now.fill_(time.monotonic_ns() // 1000)


def scan_slots_ref(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    scanned_P: Tensor,
    turn: Tensor,
    now: Tensor,
    max_requests: int,
    max_tokens: int,
    wait_us: int,
    looks: int,
) -> tuple[Tensor, ...]:
    """Define ``slot_scan.scan_slots``; ``wait_us`` and ``looks`` only say when it looks."""
    seen_PS, since_PS, taken_PS = book_3PS
    begin, waited_us = time.monotonic_ns(), 0
    for look in range(looks):
        words = _words(pairs_PC)
        # the newest word that is known of each slot, and what nobody took of them
        newest = {at: max(word, unsigned(int(seen_PS[at]))) for at, word in words.items()}
        ready = [at for at in newest if is_newer(newest[at], unsigned(int(taken_PS[at])))]
        # the first look costs nothing: planned time stands still in it
        waited_us = (time.monotonic_ns() - begin) // 1000 if look else 0
        if ready or (look and waited_us >= wait_us):
            break
    for at, word in words.items():
        if is_newer(word, unsigned(int(seen_PS[at]))):
            seen_PS[at] = signed(word)
            since_PS[at] = scanned_P[at[0]]
    scanned_P[pairs_PC[:, Column.REQUESTS] != 0] = now
    listed = _in_turn(ready, int(turn), len(pairs_PC))
    turn += 1
    ready_R = torch.full((max_requests,), -1, dtype=torch.int32)
    tokens_R, admitted, tokens_before = torch.zeros_like(ready_R), 0, 0
    for p, slot in listed[:max_requests]:
        pair = PairMemory(pairs_PC, p)
        header = REQUEST_HEADER.unpack(pair.slot(Column.REQUESTS, slot, 0, REQUEST_HEADER.size))
        tokens = min(header[6], pair[Column.MAX_TOKENS])
        tokens_before += tokens
        if admitted and tokens_before > max_tokens:
            break
        ready_R[admitted], tokens_R[admitted] = p * book_3PS.shape[2] + slot, tokens
        admitted += 1
    return ready_R, tokens_R, torch.tensor([admitted], dtype=torch.int32), now + waited_us


def _words(pairs_PC: Tensor) -> dict[tuple[int, int], int]:
    """Return the request words of all open pairs, by pair and slot."""
    words = {}
    for p in pairs_PC[:, Column.REQUESTS].nonzero().flatten().tolist():
        pair = PairMemory(pairs_PC, p)
        for slot in range(pair[Column.SLOTS]):
            words[p, slot] = pair.word(Column.REQUESTS, slot).value
    return words


def _in_turn(ready: list[tuple[int, int]], turn: int, num_pairs: int) -> list[tuple[int, int]]:
    """Return slots in the order of their turn: one of each pair, then the second of each."""
    ranks: Counter[int] = Counter()
    keys = []
    for p, slot in ready:
        keys.append((ranks[p], (p - turn) % num_pairs, p, slot))
        ranks[p] += 1
    return [(p, slot) for _, _, p, slot in sorted(keys)]


def read_requests_ref(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    ready_R: Tensor,
    now: Tensor,
    draining: Tensor,
    groups_LE: Tensor,
    max_tokens: int,
    top_k: int,
    tokens_R: Tensor | None,
) -> tuple[Tensor, ...]:
    """Define ``read_requests.read_requests``."""
    num = len(ready_R)
    headers_RF = pairs_PC.new_zeros((num, len(REQUEST_FIELDS)))
    statuses_R = torch.full((num,), NO_REQUEST, dtype=torch.int32)
    layers_R, num_tokens_R = torch.zeros_like(statuses_R), torch.zeros_like(statuses_R)
    ids_RTK = torch.full((num, max_tokens, top_k), -1, dtype=torch.int32)
    weights_RTK = torch.zeros((num, max_tokens, top_k))
    for r, entry in enumerate(ready_R.tolist()):
        if entry < 0:
            continue
        p, slot = divmod(entry, book_3PS.shape[2])
        pair = PairMemory(pairs_PC, p)
        word = pair.word(Column.REQUESTS, slot).value
        book_3PS[2, p, slot] = signed(word)
        header = bytes(pair.slot(Column.REQUESTS, slot, 0, REQUEST_HEADER.size))
        headers_RF[r] = torch.tensor([signed(field) for field in REQUEST_HEADER.unpack(header)])
        layers_R[r] = headers_RF[r, 5]
        fields = REQUEST_HEADER.unpack(header)
        status = _check(pair, word, fields, int(now) - int(book_3PS[1, p, slot]), max_tokens)
        if status is Status.OK and tokens_R is not None and fields[6] > int(tokens_R[r]):
            status = Status.OVERLOADED
        if draining.item():
            status = Status.DRAINING
        if status is Status.OK:
            layer, num_tokens = fields[5:7]
            for offset, part_TK in (
                (HEADER_BYTES, ids_RTK[r, :num_tokens]),
                (pair[Column.WEIGHTS_OFFSET], weights_RTK[r, :num_tokens]),
            ):
                data = bytearray(pair.slot(Column.REQUESTS, slot, offset, part_TK.nbytes))
                part_TK.view(-1).copy_(torch.frombuffer(data, dtype=part_TK.dtype))
            status = _check_ids(groups_LE, layer, ids_RTK[r, :num_tokens])
            num_tokens_R[r] = num_tokens if status is Status.OK else 0
        statuses_R[r] = status
    return headers_RF, statuses_R, layers_R, num_tokens_R, ids_RTK, weights_RTK


def _check(
    pair: PairMemory, word: int, fields: tuple[int, ...], waited_us: int, max_tokens: int
) -> Status:
    instance, epoch, sequence, _, budget_us, _, num_tokens, flags = fields
    ours = (unsigned(pair[Column.INSTANCE]), unsigned(pair[Column.EPOCH]), word >> 8)
    if (instance, epoch, sequence) != ours:
        return Status.STALE
    if not 1 <= num_tokens <= min(pair[Column.MAX_TOKENS], max_tokens) or flags:
        return Status.BAD_REQUEST
    return Status.EXPIRED if waited_us > budget_us else Status.OK


def _check_ids(groups_LE: Tensor, layer: int, ids_TK: Tensor) -> Status:
    if (ids_TK < -1).any():
        return Status.BAD_REQUEST
    ids = ids_TK[ids_TK >= 0].long()
    num_layers, num_experts = groups_LE.shape
    is_known = layer < num_layers and bool((ids < num_experts).all())
    if len(ids) and not (is_known and bool((groups_LE[layer, ids] >= 0).all())):
        return Status.UNKNOWN_EXPERT
    return Status.OK


def read_hidden_ref(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    ready_R: Tensor,
    num_tokens_R: Tensor,
    x_RTD: Tensor,
    scales_RTd: Tensor | None,
    blocks: int,
) -> None:
    """Define ``read_hidden.read_hidden``."""
    for r, count in enumerate(num_tokens_R.tolist()):
        if count:
            p, slot = divmod(int(ready_R[r]), book_3PS.shape[2])
            pair, parts = PairMemory(pairs_PC, p), [(Column.HIDDEN_OFFSET, x_RTD[r, :count])]
            if scales_RTd is not None:
                parts.append((Column.SCALES_OFFSET, scales_RTd[r, :count]))
            for column, part in parts:
                data = bytearray(pair.slot(Column.REQUESTS, slot, pair[column], part.nbytes))
                part.view(torch.uint8).view(-1).copy_(torch.frombuffer(data, dtype=torch.uint8))


def write_replies_ref(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    ready_R: Tensor,
    statuses_R: Tensor,
    num_tokens_R: Tensor,
    rows_ND: Tensor,
    texts_XB: Tensor,
    arrivals_R: Tensor,
    started: Tensor,
    now: Tensor | None,
    version: Tensor,
    rows_per_token: int,
    blocks: int,
) -> None:
    """Define ``write_replies.write_replies``."""
    ended = time.monotonic_ns() // 1000 if now is None else int(now)
    for r, status in enumerate(statuses_R.tolist()):
        if status == NO_REQUEST:
            continue
        p, slot = divmod(int(ready_R[r]), book_3PS.shape[2])
        pair, word = PairMemory(pairs_PC, p), unsigned(int(book_3PS[2, p, slot]))
        size, first = int(num_tokens_R[r]), r * (len(rows_ND) // len(ready_R))
        times = (max(0, int(started) - int(book_3PS[1, p, slot])), ended - int(started))
        part = rows_ND[first : first + size * rows_per_token]
        if status != Status.OK:
            part = texts_XB[status][texts_XB[status] != 0]
            size, times = len(part), (0, 0)
        copy_bits(part, pair.slot(Column.REPLIES, slot, HEADER_BYTES, part.nbytes))
        header = pair.slot(Column.REPLIES, slot, 0, REPLY_HEADER.size)
        ours = unsigned(pair[Column.INSTANCE]), unsigned(pair[Column.EPOCH]), word >> 8
        capped = [min(each, _LONGEST_TIME) for each in times]
        REPLY_HEADER.pack_into(header, 0, *ours, int(version), status, size, *capped)
        pair.word(Column.REPLIES, slot).value = ServerSlots.reply_word(word)


def count_answers_ref(
    counters_C: Tensor, statuses_R: Tensor, num_tokens_R: Tensor, started: Tensor, now: Tensor
) -> None:
    """Define ``answer_counts.count_answers``."""
    tokens = int(num_tokens_R.sum())
    experts_us = int(now) - int(started) if tokens else 0
    by_status = [int((statuses_R == status).sum()) for status in Status]
    added = [1, int(tokens > 0), tokens, experts_us, *by_status]
    counters_C += torch.tensor(added)
