"""Control frames: what comes whole, what is refused, and that no descriptor leaks."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from torch_eaas.comm import frames
from torch_eaas.comm.frames import MAX_FDS, MAX_FRAME_BYTES, receive_frame, send_frame
from torch_eaas.errors import PeerGone, PeerTimeout, TransportError

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield here, there
    here.close()
    there.close()


@pytest.fixture
def no_fd_leaks() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def frame(data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(data) if length is None else length) + data


def send_some_fds(sock: socket.socket, data: bytes, count: int) -> None:
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    socket.send_fds(sock, [data], fds)
    for fd in fds:
        os.close(fd)


def test_a_frame_is_a_length_and_json(pair: Pair) -> None:
    send_frame(pair[0], {"a": [1, "\u00e9"]})
    data = pair[1].recv(1000)
    assert int.from_bytes(data[:4], "little") == len(data) - 4
    assert json.loads(data[4:]) == {"a": [1, "\u00e9"]}


def test_frames_come_whole_and_in_order(pair: Pair) -> None:
    for number in range(3):
        send_frame(pair[0], {"n": number})
    for number in range(3):
        assert receive_frame(pair[1], 1.0) == ({"n": number}, [])


def test_a_frame_larger_than_the_sockets_buffer_comes_whole(pair: Pair) -> None:
    body = {"text": "x" * 3_000_000}
    pair[0].settimeout(10)
    thread = threading.Thread(target=send_frame, args=(pair[0], body))
    thread.start()
    assert receive_frame(pair[1], 10.0) == (body, [])
    thread.join()


def test_descriptors_come_with_their_frame_and_are_inherited_by_nobody(pair: Pair) -> None:
    fd = os.memfd_create("x")
    os.write(fd, b"hello")
    send_frame(pair[0], {"n": 1}, [fd, fd])
    send_frame(pair[0], {"n": 2})
    body, fds = receive_frame(pair[1], 1.0)
    assert body == {"n": 1}
    assert [os.pread(other, 9, 0) for other in fds] == [b"hello", b"hello"]
    assert not any(os.get_inheritable(other) for other in fds)
    assert receive_frame(pair[1], 1.0) == ({"n": 2}, [])
    for other in [fd, *fds]:
        os.close(other)


GARBAGE = [
    pytest.param(frame(b"not json"), "a frame is not JSON", id="no JSON"),
    pytest.param(frame(b""), "a frame is not JSON", id="nothing"),
    pytest.param(frame(b"\xff\xfe\x00"), "a frame is not JSON", id="no text"),
    pytest.param(frame(b'{"a": '), "a frame is not JSON", id="half of an object"),
    pytest.param(frame(b"[" * 100_000), "a frame is not JSON", id="nested too deep"),
    pytest.param(frame(b"9" * 5000), "a frame is not JSON", id="a number too long"),
    pytest.param(frame(b"[1, 2]"), "a frame is a JSON object, got list", id="a list"),
    pytest.param(frame(b"null"), "a frame is a JSON object, got NoneType", id="null"),
    pytest.param(
        frame(b"", MAX_FRAME_BYTES + 1), "at most 16777216 bytes, got 16777217", id="too long"
    ),
    pytest.param(b"GET / HTTP/1.1\r\n", "at most 16777216 bytes, got", id="HTTP"),
]


@pytest.mark.parametrize(("data", "message"), GARBAGE)
def test_garbage_is_refused_with_a_reason(data: bytes, message: str, pair: Pair) -> None:
    pair[0].sendall(data)
    with pytest.raises(TransportError, match=message):
        receive_frame(pair[1], 1.0)


@pytest.mark.usefixtures("no_fd_leaks")
@pytest.mark.parametrize(("data", "message"), GARBAGE)
def test_descriptors_of_a_refused_frame_are_closed(data: bytes, message: str, pair: Pair) -> None:
    send_some_fds(pair[0], data, 2)
    with pytest.raises(TransportError, match=message):
        receive_frame(pair[1], 1.0)


@pytest.mark.usefixtures("no_fd_leaks")
@pytest.mark.parametrize("cut", [0, 1, 3, 4, 9])
def test_a_peer_that_ends_within_a_frame_is_gone(cut: int, pair: Pair) -> None:
    if cut:
        send_some_fds(pair[0], frame(b'{"a": 1}')[:cut], 1)
    pair[0].close()
    with pytest.raises(PeerGone, match="the peer closed the control connection"):
        receive_frame(pair[1], 1.0)


@pytest.mark.parametrize("cut", [0, 2, 6])
def test_a_frame_that_does_not_come_in_time_is_a_timeout(cut: int, pair: Pair) -> None:
    pair[0].sendall(frame(b'{"a": 1}')[:cut])
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"\d of \d bytes of a frame came in 0\.05 s"):
        receive_frame(pair[1], 0.05)
    assert 0.05 <= time.monotonic() - start < 2


def test_a_peer_that_sends_byte_by_byte_does_not_get_more_time(pair: Pair) -> None:
    data = frame(b'{"a": 1}')
    stop = threading.Event()

    def trickle() -> None:
        for byte in data:
            if stop.wait(0.05):
                return
            pair[0].send(bytes([byte]))

    thread = threading.Thread(target=trickle)
    thread.start()
    start = time.monotonic()
    # 12 bytes take 0.6 s, the first 4 of them 0.2 s; the rest gets no time of its own
    with pytest.raises(PeerTimeout):
        receive_frame(pair[1], 0.3)
    assert time.monotonic() - start < 0.45
    stop.set()
    thread.join()


def test_a_server_waits_for_a_first_byte_but_not_for_the_rest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "FRAME_TIMEOUT_S", 0.05)
    timer = threading.Timer(0.2, pair[0].sendall, args=(b"\x08\0",))
    timer.start()
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"1 of 3 bytes of a frame came in 0\.05 s"):
        receive_frame(pair[1], None)
    assert 0.2 <= time.monotonic() - start < 2
    timer.join()


@pytest.mark.usefixtures("no_fd_leaks")
def test_more_descriptors_than_a_frame_may_bring_are_refused(pair: Pair) -> None:
    # the kernel cuts off what does not fit one message: what comes is not what was announced
    send_some_fds(pair[0], frame(b"{}"), MAX_FDS + 3)
    with pytest.raises(TransportError, match=f"at most {MAX_FDS} descriptors"):
        receive_frame(pair[1], 1.0)


@pytest.mark.usefixtures("no_fd_leaks")
def test_descriptors_cannot_be_heaped_up_over_many_messages(pair: Pair) -> None:
    for byte in frame(b'{"a": 1}'):
        send_some_fds(pair[0], bytes([byte]), 1)
    with pytest.raises(TransportError, match=f"at most {MAX_FDS} descriptors"):
        receive_frame(pair[1], 1.0)


def test_a_peer_that_reads_nothing_is_a_timeout_for_the_sender(pair: Pair) -> None:
    pair[0].settimeout(0.05)
    with pytest.raises(PeerTimeout, match="did not take a frame of 5000012 bytes"):
        send_frame(pair[0], {"a": "x" * 5_000_000})


def test_a_peer_that_has_ended_is_gone_for_the_sender(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(PeerGone, match="the control connection has ended"):
        send_frame(pair[0], {"a": "x" * 5_000_000})
