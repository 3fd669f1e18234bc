"""Clients that die at a random step of the protocol, and what a server keeps of them: nothing."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, get_args

import numpy as np

from benchmarks.failover_roles import Kind, ServerRole, serve
from benchmarks.marks import Marks
from benchmarks.nursery import END_S, Nursery, Offspring
from benchmarks.servers import LAYER, routing
from torch_eaas.cli.report import Report
from torch_eaas.client_pairs import Connection, open_connection
from torch_eaas.client_pieces import split
from torch_eaas.comm.frames import send_frame
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Json
from torch_eaas.comm.unix_sockets import socket_name
from torch_eaas.errors import PeerTimeout
from torch_eaas.placement import ServerInfo
from torch_eaas.protocol.layout import PROTOCOL_VERSION, PairSpec
from torch_eaas.protocol.pairs import ClientPair

DeathStep = Literal[
    "connected",
    "half a frame",
    "handshake sent",
    "pair open",
    "slot written",
    "word written",
    "answer seen",
]
"""How far a client comes before it kills itself."""

STEPS: tuple[DeathStep, ...] = get_args(DeathStep)
CALL_S = 5.0
SAMPLES = 20
WARM_SHARE = 0.2
"""What a server allocates for its first clients it keeps for the next ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a server process has at one moment."""

    rss_bytes: int
    """Resident memory."""

    descriptors: int
    """Open files, sockets and windows."""

    windows: int
    """Windows mapped."""

    threads: int
    """Threads."""

    shm_files: int
    """Files in /dev/shm, whosever they are."""


def measure(
    report: Report, nursery: Nursery, marks: Marks, kind: Kind, *, kills: int, seed: int
) -> None:
    """Add a row of what a server has kept after each of some kills."""
    marks.pairs[0] = -1
    address = f"unix:@torch-eaas-kills-{os.getpid()}"
    server = nursery.start(serve, ServerRole(kind=kind, index=0, count=1, address=address))
    rng = random.Random(seed)
    kept: list[Kept] = []
    each = max(1, kills // SAMPLES)
    marks.done[0] = 0
    try:
        _await_nobody(marks)
        for number in range(kills):
            step = rng.choice(STEPS)
            victim = nursery.start(die, kind, address, number + 1, step)
            victim.wait()
            victim.close()
            if (number + 1) % each == 0:
                _await_nobody(marks)
                kept.append(look(server))
    finally:
        server.close()
    warm = kept[int(len(kept) * WARM_SHARE) :]
    slope = float(np.polyfit(range(len(warm)), [k.rss_bytes for k in warm], 1)[0]) / each
    report.add_row(
        "client kills",
        kills=kills,
        died=marks.done[0],
        rss_bytes_per_kill=round(slope, 1),
        descriptors_first=warm[0].descriptors,
        descriptors_last=warm[-1].descriptors,
        windows_last=warm[-1].windows,
        threads_first=warm[0].threads,
        threads_last=warm[-1].threads,
        shm_files_first=warm[0].shm_files,
        shm_files_last=warm[-1].shm_files,
        rss_mib=[round(k.rss_bytes / 2**20, 2) for k in kept],
    )


def look(server: Offspring) -> Kept:
    """Return what a process has now."""
    folder = Path(f"/proc/{server.pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return Kept(
        rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        descriptors=len(list((folder / "fd").iterdir())),
        windows=(folder / "maps").read_text().count("torch-eaas-window"),
        threads=len(list((folder / "task").iterdir())),
        shm_files=len(list(Path("/dev/shm").iterdir())),
    )


def die(marks: Marks, kind: Kind, address: str, instance: int, step: DeathStep) -> None:
    """Be a client up to a step, then end by SIGKILL."""
    spec = _spec(kind)
    hello: Json = {
        "client": f"victim-{instance}",
        "instance": f"{instance:016x}",
        "epoch": 1,
        "protocol": PROTOCOL_VERSION,
        "fingerprint": "",
    }
    transport = SharedMemoryTransport()
    if step in ("half a frame", "handshake sent"):
        _send_and_die(marks, transport, address, {**hello, "spec": spec.to_json()}, step)
    link = transport.dial(address, CALL_S)
    if step == "connected":
        _die(marks)
    told, _ = link.call("describe", {}, timeout=CALL_S)
    server = ServerInfo(
        name="server-0", instance=int(told["instance"], 16), address=address, holdings={}
    )
    conn, _ = open_connection(
        Connection, transport, link, spec, server=server, pair=ClientPair(), hello=hello
    )
    if step == "pair open":
        _die(marks)
    slot = conn.take()
    assert slot is not None
    if step == "slot written":
        # all but the word
        conn._request_words = memoryview(bytearray(8 * spec.slots)).cast("Q")
    word = _send(conn, kind, slot)
    if step == "answer seen":
        end = time.monotonic() + CALL_S
        while conn.reply_words[slot] != word and time.monotonic() < end:
            time.sleep(1e-4)
        assert conn.reply_words[slot] == word, "no answer came"
    _die(marks)


def _spec(kind: Kind) -> PairSpec:
    return PairSpec(
        hidden_size=kind.sizes.hidden,
        top_k=kind.sizes.top_k,
        slots=4,
        max_tokens=128,
        wire_dtype="fp32",
        reply_dtype="fp32",
        combine="partial",
    )


def _send(conn: Connection, kind: Kind, slot: int) -> int:
    ids_TK, weights_TK = routing(kind.sizes, kind.num_tokens, 0)
    servers_TK = np.zeros(ids_TK.shape, dtype=np.int16)
    [piece] = split(servers_TK, ids_TK.numpy(), weights_TK.numpy(), 1, kind.num_tokens)
    x_TD = np.ones((kind.num_tokens, kind.sizes.hidden), dtype=np.float32)
    return conn.send(slot, LAYER, x_TD, piece, 1_000_000, 0)


def _send_and_die(
    marks: Marks, transport: SharedMemoryTransport, address: str, hello: Json, step: DeathStep
) -> NoReturn:
    """Send a handshake, or the beginning of one, and die without waiting for the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(socket_name(address))
        window = transport.create_window(PairSpec.from_json(hello["spec"]).reply_bytes)
        if step == "half a frame":
            socket.send_fds(sock, [b"\xff\x00"], [window.fd])
        else:
            body = {**hello, "verb": "handshake", "windows": [window.nbytes]}
            send_frame(sock, body, [window.fd])
        _die(marks)


def _die(marks: Marks) -> NoReturn:
    marks.done[0] += 1
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL does not return")


def _await_nobody(marks: Marks) -> None:
    """Wait until the server serves, and has noticed that all clients are gone."""
    end = time.monotonic() + END_S
    while marks.pairs[0] != 0:
        if time.monotonic() > end:
            raise PeerTimeout(f"the server has {marks.pairs[0]} pairs after {END_S:g} s, wanted 0")
        time.sleep(0.005)
    # its count may be a few looks old
    time.sleep(0.02)
