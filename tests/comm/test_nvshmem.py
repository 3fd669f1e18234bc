"""Windows of NVSHMEM: dealt once, bound to their PE, met in the handshake, reached by puts."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.comm.fake_nvshmem import FakeNvshmem, make_wheel
from torch_eaas.access import OPEN, Access
from torch_eaas.comm import nvshmem_checks
from torch_eaas.comm.auto import choose_transport
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.nvshmem import Far, NvshmemConfig, NvshmemWorld
from torch_eaas.comm.nvshmem_library import NvshmemLibrary
from torch_eaas.comm.nvshmem_transport import NvshmemTransport, NvshmemWindows, pair_up
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Handler, Json, Reply
from torch_eaas.comm.window import Window
from torch_eaas.errors import ConfigError, HandshakeRefused, TransportError
from torch_eaas.ops.pair_table import ClientTables, ServerTables, pair_row
from torch_eaas.ops.put_slots import put_replies, put_requests
from torch_eaas.ops.put_table import reply_put_row, request_put_row
from torch_eaas.ops.write_replies import Answers, refusal_texts, write_replies
from torch_eaas.ops.write_requests import Shares, write_requests
from torch_eaas.protocol.layout import REPLY_HEADER, REQUEST_HEADER, PairSpec, Status

SPEC = PairSpec(hidden_size=8, top_k=2, slots=2, max_tokens=3)
PES = 3
TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_DISABLE_DATA_DIRECT"):
        monkeypatch.setenv(name, "?")
    lib = make_wheel(tmp_path / "nvshmem", "3.6.5", "libnvshmem_device.bc")
    monkeypatch.setattr(nvshmem_checks, "wheel_folders", lambda: [lib])


class Pe(NamedTuple):
    """One process among those that started together, and what stands for NVSHMEM there."""

    world: NvshmemWorld
    fake: FakeNvshmem


def start(pe: int, role: Any, *, seed: int = 5) -> Pe:
    fake = FakeNvshmem()
    library = NvshmemLibrary(0, ibgda=False, modules=fake.modules)
    config = NvshmemConfig(role=role, pe=pe, num_pes=PES, settle_s=1.0)
    world = NvshmemWorld.open(config, SPEC, lambda _: bytes([seed]) * 128, library=library)
    return Pe(world, fake)


class Server(Handler):
    """Answers handshakes with a window of its own, and keeps both."""

    def __init__(self, transport: NvshmemTransport) -> None:
        self._transport = transport
        self.pairs: list[tuple[Window, Window, Far | None]] = []

    def admits(self, peer: int, token: object) -> bool:
        return True

    def handle(self, peer: int, verb: str, body: Json, windows: Sequence[Window]) -> Reply:
        own = self._transport.create_window(SPEC.request_bytes)
        self.pairs.append((own, windows[0], pair_up(own, windows[0])))
        return {}, [own]

    def gone(self, peer: int) -> None:
        pass


class Ends:
    """A client on PE 2 and a server on PE 1, with a control connection between them."""

    def __init__(self, stack: ExitStack, address: str = "", access: Access = OPEN) -> None:
        self.client, client = start(2, "client")
        self.server, server = start(1, "server")
        self.fakes = client, server
        self._near = NvshmemTransport(self.client)
        self.handler = Server(NvshmemTransport(self.server))
        listener = NvshmemTransport(self.server).listen(address, self.handler, access)
        stack.callback(listener.close)
        own = Access(token=access.token, tls_authority=access.tls_certificate)
        self._link = self._near.dial(listener.address, TIMEOUT_S, own)
        stack.callback(self._link.close)

    def handshake(self) -> tuple[Window, Window, Far | None]:
        own = self._near.create_window(SPEC.reply_bytes)
        _, [peers] = self._link.call("handshake", {}, [own], timeout=TIMEOUT_S)
        far = pair_up(own, peers)
        own.close()
        return own, peers, far


@pytest.fixture(params=["", "tcp://127.0.0.1:0", "tls://127.0.0.1:0"], ids=["unix", "TCP", "TLS"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    is_tls = request.param.startswith("tls")
    access = request.getfixturevalue("certified") if is_tls else OPEN
    with ExitStack() as stack:
        yield Ends(stack, request.param, access)


# -- the start ---------------------------------------------------------------------------------


def test_pe_0_makes_the_id_and_all_start_under_it() -> None:
    given: list[bytes | None] = []

    def exchange(made: bytes | None) -> bytes:
        given.append(made)
        return b"\x09" * 128

    worlds = []
    for pe in range(2):
        fake = FakeNvshmem()
        library = NvshmemLibrary(0, ibgda=False, modules=fake.modules)
        config = NvshmemConfig(role="server", pe=pe, num_pes=2)
        worlds.append(NvshmemWorld.open(config, SPEC, exchange, library=library))
        assert fake.calls[1] == ("init", b"\x09" * 128, pe, 2)
    # what the fake makes, and nothing
    assert given == [b"\x05" * 128, None]
    assert worlds[0].name == worlds[1].name != start(0, "client").world.name


def test_each_pe_has_a_window_of_each_direction_for_every_pe() -> None:
    client, clients = start(2, "client")
    server, servers = start(1, "server")
    request_bytes, reply_bytes = SPEC.request_bytes, SPEC.reply_bytes
    replies = PES * request_bytes
    assert [server.own_window(pe) - servers.heap for pe in (0, 2)] == [0, 2 * request_bytes]
    staging = [server.staging(pe) - servers.heap for pe in (0, 2)]
    assert staging == [replies, replies + 2 * reply_bytes]
    # each writes where the other one looks, and nobody else
    far = client.far_window(1)
    assert (far.pe, clients.reach(far.window, servers)) == (1, server.own_window(2))
    far = server.far_window(2)
    assert (far.pe, servers.reach(far.window, clients)) == (2, client.own_window(1))


def test_the_log_says_what_does_not_hold(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch_eaas"):
        start(1, "server")
    assert "PE 1 of 3, a server" in caplog.text
    assert "when one dies the others may hang or abort (invariants 1, 3 and 4" in caplog.text


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"pe": 3}, "pe must be below num_pes = 3, got 3"),
        ({"pe": -1}, "pe must be an integer of at least 0, got -1"),
        ({"num_pes": 0}, "num_pes must be an integer of at least 1, got 0"),
        ({"role": "monitor"}, "role must be one of client, server, got 'monitor'"),
    ],
)
def test_a_place_that_is_none_is_refused(changed: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"role": "client", "pe": 0, "num_pes": 3, **changed}
    with pytest.raises(ConfigError, match=match):
        NvshmemConfig(**given)


def test_by_name_alone_it_cannot_be_had_and_the_error_says_how() -> None:
    with pytest.raises(ConfigError, match=r"processes start together: .*NvshmemWorld\.open"):
        choose_transport("nvshmem", device="cuda")


# -- the handshake -----------------------------------------------------------------------------


def test_a_handshake_tells_both_ends_where_their_windows_lie(ends: Ends) -> None:
    own, peers, far = ends.handshake()
    [(servers_own, clients, back)] = ends.handler.pairs
    client, server = ends.client, ends.server
    assert (own.memory.address, own.nbytes) == (client.own_window(1), SPEC.reply_bytes)
    assert (peers.memory.address, far) == (client.staging(1), client.far_window(1))
    assert servers_own.memory.address == server.own_window(2)
    assert (clients.memory.address, back) == (server.staging(2), server.far_window(2))


def test_a_request_is_put_and_answered_between_the_windows(ends: Ends) -> None:
    own, peers, far = ends.handshake()
    [(servers_own, clients, back)] = ends.handler.pairs
    assert far is not None
    assert back is not None
    fakes = ends.fakes
    one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    near = ClientTables.empty(1, SPEC.slots)
    addresses = {"requests": peers.memory.address, "replies": own.memory.address}
    near.pairs_PC[0] = torch.tensor(pair_row(SPEC, **addresses, instance=7, epoch=1))
    # what NVSHMEM would do with the symmetric address
    window = fakes[0].reach(far.window, fakes[1])
    puts_PQ = torch.tensor([request_put_row(SPEC, window=window, pe=far.pe)])
    shares = Shares(one, one[None] * 0, one.new_ones(1, 3, 2), torch.ones(1, 3, 2))
    arrivals = torch.zeros(1, dtype=torch.int32)
    x_ND = torch.arange(8.0)[None]
    options: Any = {"layer": 4, "version": zero, "budget_us": 99}
    write_requests(near, shares, x_ND, zero, arrivals, **options)
    put_requests(near, puts_PQ, one, zero, bitcode="")

    request = ctypes.string_at(servers_own.memory.address, SPEC.request_bytes)
    header = REQUEST_HEADER.unpack_from(request, SPEC.request_slot(0))
    assert request[:8] == (0x101).to_bytes(8, "little")
    assert header == (7, 1, 1, 0, 99, 4, 1, 0)
    at = SPEC.request_slot(0) + SPEC.hidden_offset
    assert request[at : at + 32] == x_ND.numpy().tobytes()

    far_tables = ServerTables.empty(1, SPEC.slots)
    addresses = {"requests": servers_own.memory.address, "replies": clients.memory.address}
    far_tables.pairs_PC[0] = torch.tensor(pair_row(SPEC, **addresses, instance=7, epoch=1))
    far_tables.book_3PS[2, 0, 0] = 0x101
    window = fakes[1].reach(back.window, fakes[0])
    puts_PQ = torch.tensor([reply_put_row(SPEC, window=window, pe=back.pe)])
    answers = Answers(one * 0, one * 0, one, 2 * x_ND)
    times = {"started": zero, "now": zero, "version": zero}
    write_replies(far_tables, answers, refusal_texts(), arrivals, **times, rows_per_token=1)
    put_replies(far_tables, puts_PQ, one * 0, one * 0, zero, bitcode="")

    reply = ctypes.string_at(own.memory.address, SPEC.reply_bytes)
    assert reply[:8] == (0x102).to_bytes(8, "little")
    assert REPLY_HEADER.unpack_from(reply, SPEC.reply_slot(0))[:6] == (7, 1, 1, 0, Status.OK, 1)
    at = SPEC.reply_slot(0) + SPEC.rows_offset
    assert reply[at : at + 32] == (2 * x_ND).numpy().tobytes()


def test_a_new_epoch_lies_in_the_same_place_settled_and_cleared(ends: Ends) -> None:
    first, *_ = ends.handshake()
    fakes = ends.fakes
    for fake in fakes:
        fake.calls.clear()
    second, *_ = ends.handshake()
    assert second.memory.address == first.memory.address
    # what was put before has arrived before the peer clears, and before the words count anew
    assert [call[0] for call in fakes[0].calls] == ["quiet", "clear"]
    assert [call[0] for call in fakes[1].calls] == ["quiet", "clear"]
    assert fakes[0].calls[1] == ("clear", ends.client.own_window(1), SPEC.reply_bytes)
    assert fakes[1].calls[1] == ("clear", ends.server.own_window(2), SPEC.request_bytes)


def test_where_stores_reach_the_peer_nothing_is_put(ends: Ends) -> None:
    ends.fakes[0].peers = {1: ends.fakes[1]}
    _, peers, far = ends.handshake()
    assert far is None
    assert peers.memory.address == ends.server.own_window(2)


def test_a_window_has_no_place_before_its_peer_is_known(ends: Ends) -> None:
    own = NvshmemTransport(ends.client).create_window(SPEC.reply_bytes)
    with pytest.raises(TransportError, match=r"no place before the handshake .*: call pair_up"):
        own.memory  # noqa: B018 - asking is what is tested
    with pytest.raises(TransportError, match=r"lies in GPU memory, .* use DeviceClient and Dev"):
        own.view  # noqa: B018
    with pytest.raises(TransportError, match="has no file descriptor: it is told in words"):
        own.fd  # noqa: B018
    own.close()
    own.close()


def test_a_window_larger_than_what_was_dealt_is_refused(ends: Ends) -> None:
    match = f"{SPEC.reply_bytes + 1} bytes is asked for, and those of this start have"
    with pytest.raises(ConfigError, match=match):
        NvshmemTransport(ends.client).create_window(SPEC.reply_bytes + 1)


@pytest.mark.parametrize(
    ("peer", "match"),
    [
        (lambda: start(0, "client"), "PE 0 is a client too; open its world as what it is"),
        (lambda: start(0, "server", seed=6), "PE 0 belongs to another start of NVSHMEM"),
    ],
    ids=["same role", "other start"],
)
def test_a_stranger_is_refused(ends: Ends, peer: Any, match: str) -> None:
    windows = NvshmemWindows(peer().world)
    with pytest.raises(TransportError, match=match):
        NvshmemWindows(ends.client).adopt(-1, windows.tell(windows.create(64)))


@pytest.mark.parametrize("told", [None, 8, 8.5, "pe", [], ["pe"], {}, {"pe": 1}], ids=str)
def test_what_is_no_description_is_refused(ends: Ends, told: object) -> None:
    with pytest.raises(TransportError, match="what came is no window of NVSHMEM's"):
        NvshmemWindows(ends.client).adopt(-1, told)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"pe": 3}, "must be of a PE below 3, got 3"),
        ({"pe": -1}, "must be of a PE below 3, got -1"),
        ({"pe": True}, "must be of a PE below 3, got True"),
        ({"pe": "1"}, "must be of a PE below 3, got '1'"),
        ({"nbytes": SPEC.request_bytes + 1}, f"at most {SPEC.request_bytes} bytes, got {{more}}"),
        ({"nbytes": 0}, f"of PE 1 has at most {SPEC.request_bytes} bytes, got 0"),
        ({"nbytes": 8.5}, f"of PE 1 has at most {SPEC.request_bytes} bytes, got 8.5"),
        ({"start": ["x"]}, r"another start of NVSHMEM \(\['x'\], this is"),
    ],
    ids=str,
)
def test_a_window_that_none_was_dealt_is_refused(
    ends: Ends, changed: dict[str, Any], match: str
) -> None:
    theirs = NvshmemWindows(ends.server)
    told = theirs.tell(theirs.create(256))
    windows = NvshmemWindows(ends.client)
    assert windows.adopt(-1, told).nbytes == 256
    with pytest.raises(TransportError, match=match.format(more=SPEC.request_bytes + 1)):
        windows.adopt(-1, {**told, **changed})


def test_an_end_of_another_transport_is_refused(ends: Ends) -> None:
    other = SharedMemoryTransport()
    listener = NvshmemTransport(ends.server).listen("", ends.handler)
    link = other.dial(listener.address, TIMEOUT_S)
    with pytest.raises(HandshakeRefused, match="are shared_memory's, this server's are nvshm"):
        link.call("handshake", {}, [other.create_window(64)], timeout=TIMEOUT_S)
    link.close()
    listener.close()


def test_windows_of_other_transports_need_no_puts() -> None:
    transport = LoopbackTransport()
    assert pair_up(transport.create_window(8), transport.create_window(8)) is None
