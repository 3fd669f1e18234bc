"""The real client and server write byte for byte what the traces say, and nothing else."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from tests.protocol.record_traces import CLIENT, LAYERS, SCRIPTS, TRACES, Exchange, run, tokens

Trace = dict[str, Any]
EVERY = pytest.mark.parametrize("name", SCRIPTS)


def trace_of(name: str) -> Trace:
    trace: Trace = json.loads((TRACES / f"{name}.json").read_text())
    return trace


def writes_of(trace: Trace, event: int) -> dict[str, bytes]:
    """Return the bytes that one event wrote, by part; the pieces of a part joined."""
    parts: dict[str, bytes] = {}
    for write in trace["events"][event]["writes"]:
        parts[write["part"]] = parts.get(write["part"], b"") + bytes.fromhex(write["hex"])
    return parts


@EVERY
def test_a_script_writes_what_was_recorded(name: str) -> None:
    trace, _ = run(name)
    recorded = trace_of(name)
    for event, expected in zip(trace["events"], recorded["events"], strict=True):
        assert event == expected
    assert trace == recorded, "python -m tests.protocol.record_traces records anew"


@EVERY
def test_what_a_trace_does_not_name_was_never_written(name: str) -> None:
    _, windows = run(name)
    trace = trace_of(name)
    for window, view in windows.items():
        expected = bytearray([0]) * 128
        expected += bytes([int(trace["fill"], 16)]) * (trace["bytes"][window] - 128)
        for event in trace["events"]:
            for write in event["writes"]:
                if write["window"] == window:
                    data = bytes.fromhex(write["hex"])
                    expected[write["at"] : write["at"] + len(data)] = data
        assert view == bytes(expected)


@EVERY
def test_each_window_has_one_writer(name: str) -> None:
    writers = {"client": {"request"}, "server": {"reply"}}
    for event in trace_of(name)["events"]:
        written = {write["window"] for write in event["writes"]}
        assert written <= writers[event["what"].split()[0]]


def test_every_trace_has_its_script() -> None:
    assert {path.stem for path in TRACES.iterdir()} == set(SCRIPTS)


# -- the same bytes, read by hand --------------------------------------------------------------


def test_a_requests_bytes_are_those_of_the_specification() -> None:
    parts = writes_of(trace_of("partial"), 0)
    assert parts["slot 0 word"] == b"\x01\x01" + bytes(6)
    assert parts["slot 0 header"] == struct.pack(
        # instance, epoch, sequence, placement version, 60 s of budget, layer, tokens, flags
        "<QQQQQIII",
        CLIENT,
        1,
        1,
        1,
        60_000_000,
        1,
        3,
        0,
    )
    assert parts["slot 0 ids"] == struct.pack("<6i", 0, 1, 3, -1, 2, 2)
    assert parts["slot 0 weights"] == struct.pack("<6f", 0.5, 0.25, 1.0, 0.0, 0.125, 2.0)
    x = [number for token in tokens(3) for number in token]
    assert parts["slot 0 hidden"] == struct.pack("<24f", *x)


def test_a_replys_bytes_are_those_of_the_specification() -> None:
    parts = writes_of(trace_of("partial"), 1)
    assert parts["slot 0 word"] == b"\x02\x01" + bytes(6)
    assert parts["slot 0 header"] == struct.pack(
        # instance, epoch, sequence, placement version, status, tokens, one tick, two ticks
        "<QQQQIIII",
        CLIENT,
        1,
        1,
        0,
        0,
        3,
        976,
        1953,
    )
    # expert e of layer 1 multiplies by 1 + e
    sums = [0.5 * 1 + 0.25 * 2, 1.0 * 4, 0.125 * 3 + 2.0 * 3]
    rows = [s * n for s, token in zip(sums, tokens(3), strict=True) for n in token]
    assert parts["slot 0 rows or text"] == struct.pack("<24f", *rows)


def test_the_next_request_of_a_slot_leaves_the_bytes_that_it_does_not_use() -> None:
    parts = writes_of(trace_of("partial"), 3)
    assert parts["slot 0 word"] == b"\x01\x02" + bytes(6)
    # the number of experts means none and travels as -1; one token only
    assert parts["slot 0 ids"] == struct.pack("<2i", -1, 3)
    assert parts["slot 0 hidden"] == struct.pack("<8f", *tokens(1, 5.0)[0])


def test_an_exact_reply_has_a_row_for_each_token_and_expert_and_zeros_for_none() -> None:
    parts = writes_of(trace_of("exact"), 1)
    first, second = tokens(2)
    rows = [
        [0.5 * 4 * n for n in first],
        [0.25 * 1 * n for n in first],
        [0.0] * 8,
        [0.5 * 3 * n for n in second],
    ]
    assert parts["slot 0 rows or text"] == b"".join(struct.pack("<8f", *row) for row in rows)


def test_bf16_travels_as_the_upper_half_of_fp32() -> None:
    trace = trace_of("bf16")
    sent = b"".join(struct.pack("<f", n)[2:] for token in tokens(2) for n in token)
    assert writes_of(trace, 0)["slot 0 hidden"] == sent
    # expert e of layer 2 multiplies by 2 + e
    sums = [0.5 * 2 + 0.25 * 3, 1.0 * 5 + 0.5 * 4]
    rows = [s * n for s, token in zip(sums, tokens(2), strict=True) for n in token]
    came = b"".join(struct.pack("<f", n)[2:] for n in rows)
    assert writes_of(trace, 1)["slot 0 rows or text"] == came


def test_fp8_travels_as_e4m3_beside_its_scales() -> None:
    parts = writes_of(trace_of("fp8"), 0)
    # 112 / 448 twice, and 1 for zeros
    assert parts["slot 0 scales"] == struct.pack("<3f", 0.25, 0.25, 1.0)
    # 7 * 2**(d - 3) / 0.25 is 3.5 to 448: exponents 1 to 8, biased by 7, and three bits 110
    first = [(d + 1 + 7) << 3 | 0b110 for d in range(8)]
    # 448, 64, 80, 4, 8, 12, 20, -64
    second = [0x7E, 0x68, 0x6A, 0x48, 0x50, 0x54, 0x5A, 0xE8]
    assert parts["slot 0 hidden"] == bytes([*first, *second, *[0] * 8])


def test_fp8_is_computed_with_in_fp32() -> None:
    trace = trace_of("fp8")
    kept = [112.0, 16.0, 20.0, 1.0, 2.0, 3.0, 5.0, -16.0]
    # expert e of layer 2 multiplies by 2 + e
    sums = [0.5 * 2 + 0.25 * 3, 1.0 * 5 + 0.5 * 4, 2.0 * 3]
    x = [tokens(1, 7.0)[0], kept, [0.0] * 8]
    rows = [s * n for s, token in zip(sums, x, strict=True) for n in token]
    assert writes_of(trace, 1)["slot 0 rows or text"] == struct.pack("<24f", *rows)


def test_two_requests_in_flight_have_slots_words_and_sequences_of_their_own() -> None:
    trace = trace_of("two_in_flight")
    first, second, reply = (writes_of(trace, event) for event in range(3))
    assert first["slot 0 word"] == second["slot 1 word"] == b"\x01\x01" + bytes(6)
    assert not first.keys() & second.keys()
    assert reply["slot 0 word"] == reply["slot 1 word"] == b"\x02\x01" + bytes(6)
    # 1 and 2 tokens
    assert reply["slot 0 header"][36:40] == struct.pack("<I", 1)
    assert reply["slot 1 header"][36:40] == struct.pack("<I", 2)


def test_a_refusal_carries_its_status_and_a_text_where_rows_would_be() -> None:
    parts = writes_of(trace_of("unknown_expert"), 1)
    header, text = parts["slot 0 header"], parts["slot 0 rows or text"]
    status, size = struct.unpack_from("<II", header, 32)
    assert status == 1
    assert text[:size].decode() == "layer 1: experts [1, 3] are not held here"
    assert set(text[size:]) <= {0xA5}


# -- the order of writes -----------------------------------------------------------------------


class WordsSpy:
    """Stands for a window's words: keeps what the window held at the moment a word was stored."""

    def __init__(self, words: memoryview, window: memoryview) -> None:
        self._words, self._window = words, window
        self.held: list[bytes] = []

    def __getitem__(self, slot: int) -> int:
        return self._words[slot]

    def __setitem__(self, slot: int, word: int) -> None:
        self.held.append(bytes(self._window))
        self._words[slot] = word

    def tolist(self) -> list[int]:
        return self._words.tolist()


@pytest.mark.parametrize("end", ["client", "server"])
def test_a_word_is_stored_after_everything_it_announces(end: str) -> None:
    world = Exchange(max_micro_batches=1)
    [connection] = world._client._connections.live.values()
    [pair] = world._server._control.pairs
    writer, words = (connection, "_request_words") if end == "client" else (pair, "_reply_words")
    window = world.windows["request" if end == "client" else "reply"]
    spy = WordsSpy(getattr(writer, words), window)
    setattr(writer, words, spy)
    ticket = world.dispatch(LAYERS[0], tokens(2), [[0, 1], [2, 3]], [[1.0, 0.5], [0.5, 1.0]])
    world.serve()
    [held] = spy.held
    assert held[:128] == bytes(128)
    assert held[128:] == bytes(window[128:])
    world.combine(ticket)
    world.close()
