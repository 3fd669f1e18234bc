"""The plain twins of the ops of a server's data path, built on the protocol's own rules.

Shape suffixes: see ``pair_table``.
"""

from __future__ import annotations

import time

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
) -> tuple[Tensor, Tensor]:
    """Define ``slot_scan.scan_slots``."""
    _, num_pairs, num_slots = book_3PS.shape
    seen_PS, since_PS, taken_PS = book_3PS
    ready: list[list[int]] = []
    for i in range(num_pairs):
        p = (i + int(turn)) % num_pairs
        pair = PairMemory(pairs_PC, p)
        ready.append([])
        if not pair[Column.REQUESTS]:
            continue
        for slot in range(pair[Column.SLOTS]):
            word = pair.word(Column.REQUESTS, slot).value
            if is_newer(word, unsigned(int(seen_PS[p, slot]))):
                seen_PS[p, slot] = signed(word)
                since_PS[p, slot] = scanned_P[p]
            if is_newer(unsigned(int(seen_PS[p, slot])), unsigned(int(taken_PS[p, slot]))):
                ready[-1].append(p * num_slots + slot)
        scanned_P[p] = now[0]
    turn += 1
    in_turn = [entry for k in range(num_slots) for entries in ready for entry in entries[k : k + 1]]
    listed = in_turn[:max_requests]
    ready_R = torch.tensor(listed + [-1] * (max_requests - len(listed)), dtype=torch.int32)
    return ready_R, torch.tensor([len(listed)], dtype=torch.int32)


def read_requests_ref(
    pairs_PC: Tensor,
    book_3PS: Tensor,
    ready_R: Tensor,
    now: Tensor,
    draining: Tensor,
    groups_LE: Tensor,
    max_tokens: int,
    top_k: int,
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
    now: Tensor,
    version: Tensor,
    rows_per_token: int,
    blocks: int,
) -> None:
    """Define ``write_replies.write_replies``."""
    for r, status in enumerate(statuses_R.tolist()):
        if status == NO_REQUEST:
            continue
        p, slot = divmod(int(ready_R[r]), book_3PS.shape[2])
        pair, word = PairMemory(pairs_PC, p), unsigned(int(book_3PS[2, p, slot]))
        size, first = int(num_tokens_R[r]), r * (len(rows_ND) // len(ready_R))
        times = (max(0, int(started) - int(book_3PS[1, p, slot])), int(now) - int(started))
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
