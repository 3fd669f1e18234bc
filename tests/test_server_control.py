"""Control calls and their answers may be anything: only errors of our own come of it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from tests.json_values import VALUE, almost
from tests.served import D, K, PlannedExperts, pool
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.transport import Handler, Json, Reply
from torch_eaas.comm.window import Window
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.errors import EaasError, HandshakeRefused, TransportError
from torch_eaas.monitor.agent import MonitorAgent
from torch_eaas.placement import Placement
from torch_eaas.protocol.layout import PROTOCOL_VERSION, PairSpec
from torch_eaas.server import ExpertServer

SPEC = PairSpec(hidden_size=D, top_k=K, slots=2, max_tokens=4)
HELLO: dict[str, Any] = {
    "client": "c",
    "instance": "00000000000000c1",
    "epoch": 1,
    "protocol": PROTOCOL_VERSION,
    "fingerprint": "",
    "spec": SPEC.to_json(),
}
CALLS: dict[str, Any] = {
    "handshake": HELLO,
    "close": {"instance": "00000000000000c1", "epoch": 1},
    "describe": {},
    "health": {},
    "metrics": {},
    "placement": {},
    "drain": {},
}
CALL = st.sampled_from(sorted(CALLS)).flatmap(
    lambda verb: st.tuples(st.just(verb), almost(CALLS[verb]))
)


def travelled(body: Any) -> Any:
    """Return what the other end of a control connection would read."""
    return json.loads(json.dumps(body))


@settings(max_examples=100)
@given(
    calls=st.lists(CALL | st.tuples(st.text(max_size=5), VALUE), min_size=1, max_size=4),
    size=st.sampled_from([SPEC.reply_bytes] * 3 + [128, 0]),
)
def test_no_control_call_ends_in_anything_but_an_error_of_ours(
    calls: list[tuple[str, Any]], size: int
) -> None:
    transport = LoopbackTransport()
    server = ExpertServer(PlannedExperts(pool()), ServerConfig(name="s"), transport=transport)
    windows = [transport.create_window(size)] if size else []
    for verb, body in calls:
        if isinstance(body, dict):
            try:
                answer, _ = server._control.handle(1, verb, travelled(body), windows)
            except EaasError as error:
                json.dumps(str(error))
            else:
                json.dumps(answer)
    server.step()
    server._control.handle(2, "describe", {}, ())
    server._control.gone(1)
    server.close()


def test_of_two_handshakes_at_once_the_one_that_finds_no_room_at_the_end_leaves_nothing() -> None:
    transport = LoopbackTransport()
    config = ServerConfig(name="s", max_pairs=1)
    with ExpertServer(PlannedExperts(pool()), config, transport=transport) as server:
        control, make_pair = server._control, server._control.make_pair
        made: list[Window] = []

        def shake(instance: str) -> None:
            windows = [transport.create_window(SPEC.reply_bytes)]
            control.handle(1, "handshake", {**HELLO, "instance": instance}, windows)

        def overtaken(**pair: Any) -> Any:
            # both were checked before either was on the list
            made.append(pair["requests"])
            control.make_pair = make_pair
            shake("00000000000000c2")
            return make_pair(**pair)

        control.make_pair = overtaken
        with pytest.raises(HandshakeRefused, match="server s has 1 clients already"):
            shake("00000000000000c1")
        assert [pair.instance for pair in control.pairs] == [0xC2]
        with pytest.raises(TransportError, match="this window is closed"):
            _ = made[0].view


class Liar(Handler):
    """A server that answers with what the test drew."""

    def __init__(self, server: ExpertServer, answers: dict[str, Any], num_windows: int) -> None:
        self._server = server
        self._answers = answers
        self._num_windows = num_windows
        self.made: list[Window] = []

    @override
    def admits(self, peer: int, token: object) -> bool:
        return True

    @override
    def handle(self, peer: int, verb: str, body: Json, windows: Any) -> Reply:
        answer, made = self._server._control.handle(peer, verb, body, windows)
        made = [*made, *windows][: self._num_windows]
        self.made += made
        return self._answers.get(verb, answer), made

    @override
    def gone(self, peer: int) -> None:
        pass


class Listening(MonitorAgent):
    """Takes placements, and has no monitor."""

    def __init__(self) -> None:
        pass

    @override
    def offer(self, placement: Placement) -> bool:
        return bool(json.dumps(placement.to_json()))


REFERENCE: dict[str, Any] = {
    "describe": {
        "name": "s",
        "instance": "00000000000000a1",
        "fingerprint": "",
        "hidden_size": D,
        "holdings": {"1": [0, 1], "3": [7]},
        "state": "serving",
    },
    "placement": {"placement": {"term": 1, "version": 1, "servers": []}},
}
REFERENCE["handshake"] = {**REFERENCE["describe"], "epoch": 1}


@settings(max_examples=60)
@given(
    answers=st.fixed_dictionaries({}, optional={v: almost(REFERENCE[v]) for v in REFERENCE}),
    num_windows=st.sampled_from([1, 1, 1, 0, 2]),
)
def test_no_answer_of_a_server_ends_a_client(answers: dict[str, Any], num_windows: int) -> None:
    transport = LoopbackTransport()
    config = ServerConfig(name="s")
    server = ExpertServer(PlannedExperts(pool()), config, transport=transport, instance=0xA1)
    told = {verb: travelled(answer) for verb, answer in answers.items()}
    told = {verb: answer for verb, answer in told.items() if isinstance(answer, dict)}
    listener = transport.listen("loopback:liar", Liar(server, told, num_windows))
    options = ClientConfig(hidden_size=D, top_k=K)
    with contextlib.suppress(EaasError):
        client = Client(options, servers=["loopback:liar"], transport=transport, background=False)
        client._directory._ask_for_placement(Listening())
        client.close()
    listener.close()
    server.close()


def test_windows_of_an_answer_that_is_refused_are_closed() -> None:
    transport = LoopbackTransport()
    server = ExpertServer(pool(), ServerConfig(name="s"), transport=transport, instance=0xA1)
    for answer, num_windows in ((REFERENCE["handshake"], 2), ({"instance": "b" * 16}, 1)):
        liar = Liar(server, {"handshake": answer}, num_windows)
        listener = transport.listen("loopback:liar", liar)
        options = ClientConfig(hidden_size=D, top_k=K)
        client = Client(options, servers=["loopback:liar"], transport=transport, background=False)
        assert len(liar.made) == num_windows
        for window in liar.made:
            with pytest.raises(TransportError, match="this window is closed"):
                _ = window.view
        client.close()
        listener.close()
    server.close()
