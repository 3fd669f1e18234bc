"""Byte traces: scripted exchanges between a real client and a real server, as bytes in windows.

Instance ids are fixed, the clock stands still unless a script moves it, and the experts compute
exact numbers, so a trace is the same on every machine. A trace lists, event by event, the bytes
that changed; windows are filled with 0xa5 behind their words before the first event, so a byte
that a trace does not name is one that nobody wrote.

Record all traces anew after a change of the protocol::

    python -m tests.protocol.record_traces

and read the difference before committing it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.window import Window
from torch_eaas.config import ClientConfig, ServerConfig
from torch_eaas.experts import GroupTable
from torch_eaas.placement import Holdings, holdings_from
from torch_eaas.protocol.layout import PairSpec
from torch_eaas.server import ExpertServer
from torch_eaas.server_batch import Experts

TRACES = Path(__file__).parent / "traces"
CLIENT, SERVER = 0x1111222233334444, 0x5555666677778888
FILL = 0xA5
D, K, E = 8, 2, 4
LAYERS = (1, 2)
TICK = 1 / 1024
"""A time of which floats make no rounding: 976 whole microseconds."""

WORDS_BYTES = 128


class SpyTransport(LoopbackTransport):
    """Keeps the windows it made: first the client's reply window, then the request window."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[memoryview] = []

    @override
    def create_window(self, nbytes: int) -> Window:
        window = super().create_window(nbytes)
        self.views.append(window.view)
        return window


class ScalingExperts(Experts):
    """Expert e of layer n multiplies by n + e and takes two ticks a batch; all sums are exact."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self.hold({(layer, expert) for layer in LAYERS for expert in range(E)})

    def hold(self, keys: set[tuple[int, int]]) -> None:
        """Hold these (layer, expert) pairs from now on."""
        self._holdings = holdings_from(keys)
        scales: Any = {(layer, expert): float(layer + expert) for layer, expert in keys}
        self._table = GroupTable(scales)

    @property
    @override
    def hidden_size(self) -> int:
        return D

    @property
    @override
    def holdings(self) -> Holdings:
        return self._holdings

    @property
    @override
    def table(self) -> GroupTable:
        return self._table

    @override
    def run(
        self,
        table: GroupTable,
        x_TD: Tensor,
        groups_TK: Tensor,
        weights_TK: Tensor,
        *,
        per_expert: bool,
    ) -> Tensor:
        self._tick()
        self._tick()
        # one scale more, 0: it serves group -1
        scales = torch.tensor([*table.experts, 0.0])
        rows_TKD = (scales[groups_TK] * weights_TK).unsqueeze(-1) * x_TD.float().unsqueeze(1)
        return rows_TKD if per_expert else rows_TKD.sum(1)


class Exchange:
    """A client and a server that move only when a script says so, and what they wrote.

    Args:
        options: Fields of the client's config.
    """

    def __init__(self, **options: Any) -> None:
        self._now = 1000.0
        transport = SpyTransport()
        self.experts = ScalingExperts(self.tick)
        self._server = ExpertServer(
            self.experts,
            ServerConfig(name="server", address="loopback:server", fingerprint="traced"),
            transport=transport,
            instance=SERVER,
            clock=lambda: self._now,
        )
        self._client = Client(
            ClientConfig(hidden_size=D, top_k=K, max_tokens=3, **options),
            servers=["loopback:server"],
            transport=transport,
            instance=CLIENT,
            clock=lambda: self._now,
            background=False,
        )
        replies, requests = transport.views
        self.windows = {"request": requests, "reply": replies}
        config = self._client.config
        self.spec = PairSpec(
            hidden_size=D,
            top_k=K,
            slots=config.slots,
            max_tokens=config.max_tokens,
            wire_dtype=config.wire_dtype,
            reply_dtype=config.reply_dtype,
            combine=config.combine,
        )
        for view in self.windows.values():
            view[WORDS_BYTES:] = bytes([FILL]) * (len(view) - WORDS_BYTES)
        self.events: list[dict[str, Any]] = []
        self._seen = {name: bytes(view) for name, view in self.windows.items()}

    def tick(self) -> None:
        """Let a little time pass."""
        self._now += TICK

    def dispatch(
        self, layer: int, x: list[list[float]], ids: list[list[int]], weights: list[list[float]]
    ) -> Tensor:
        """Let the client send; return its ticket."""
        ticket = self._client.dispatch(
            layer, torch.tensor(x), torch.tensor(ids), torch.tensor(weights), num_experts=E
        )
        self._note(f"client dispatches {len(x)} tokens to layer {layer}")
        return ticket

    def serve(self) -> None:
        """Let the server scan once and serve what it finds."""
        frames = self._server.step()
        self._note(f"server answers {frames} requests")

    def combine(self, ticket: Tensor) -> None:
        """Let the client read its answers, which have come."""
        result_TD = self._client.combine(ticket).tolist()
        self._note("client combines", result=[" ".join(map(str, row_D)) for row_D in result_TD])

    def close(self) -> None:
        """End both."""
        self._client.close()
        self._server.close()

    def _note(self, what: str, **more: Any) -> None:
        """Note what was written since the last event."""
        writes = []
        for name, view in self.windows.items():
            before, after = self._seen[name], bytes(view)
            self._seen[name] = after
            writes += [
                {"window": name, "part": self._part(name, at), "at": at, "hex": data.hex()}
                for at, data in changed(before, after)
            ]
        self.events.append({"what": what, **more, "writes": writes})

    def _part(self, window: str, at: int) -> str:
        """Return which part of which slot lies at an offset: for whoever reads a trace."""
        if at < WORDS_BYTES:
            return f"slot {at // 8} word"
        spec = self.spec
        if window == "request":
            size, parts = (
                spec.request_slot_bytes,
                {
                    "hidden": spec.hidden_offset,
                    "scales": spec.scales_offset,
                    "weights": spec.weights_offset,
                    "ids": spec.ids_offset,
                },
            )
        else:
            size, parts = spec.reply_slot_bytes, {"rows or text": spec.rows_offset}
        slot, within = divmod(at - WORDS_BYTES, size)
        part = next((name for name, start in parts.items() if within >= start), "header")
        return f"slot {slot} {part}"


def changed(before: bytes, after: bytes) -> list[tuple[int, bytes]]:
    """Return the pieces that changed, in whole words, and in units of 4 bytes behind the words."""
    pieces: list[tuple[int, bytes]] = []
    for start, end, unit in ((0, WORDS_BYTES, 8), (WORDS_BYTES, len(after), 4)):
        for at in range(start, end, unit):
            if before[at : at + unit] == after[at : at + unit]:
                continue
            # units that touch make one piece; each word is its own
            if unit == 4 and pieces and pieces[-1][0] + len(pieces[-1][1]) == at:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + after[at : at + unit])
            else:
                pieces.append((at, after[at : at + unit]))
    return pieces


# -- the scripts -------------------------------------------------------------------------------


ROUNDED = [112.0, 17.0, 19.0, 1.0, 2.0, 3.0, 5.0, -17.0]
"""A token of which fp8, whose scale is 112 / 448, keeps 16 and 20 in place of 17 and 19."""


def tokens(count: int, first: float = 1.0) -> list[list[float]]:
    """Return tokens whose every number is another power of two or its half more."""
    return [[(first + t) * 2.0 ** (d - 3) for d in range(D)] for t in range(count)]


def partial(world: Exchange) -> None:
    """Three tokens, then one: the second request takes the same slot and leaves the rest."""
    ticket = world.dispatch(
        1, tokens(3), [[0, 1], [3, -1], [2, 2]], [[0.5, 0.25], [1.0, 0.0], [0.125, 2.0]]
    )
    world.tick()
    world.serve()
    world.combine(ticket)
    world.tick()
    ticket = world.dispatch(2, tokens(1, 5.0), [[E, 3]], [[1.0, 0.75]])
    world.serve()
    world.combine(ticket)


def exact(world: Exchange) -> None:
    """One row for each token and expert; what nobody computes is zero."""
    ticket = world.dispatch(1, tokens(2), [[3, 0], [-1, 2]], [[0.5, 0.25], [1.0, 0.5]])
    world.serve()
    world.combine(ticket)


def bf16(world: Exchange) -> None:
    """Sixteen bits both ways."""
    ticket = world.dispatch(2, tokens(2), [[0, 1], [3, 2]], [[0.5, 0.25], [1.0, 0.5]])
    world.serve()
    world.combine(ticket)


def fp8(world: Exchange) -> None:
    """Eight bits and a scale for each token: one that loses nothing, one that does, and zeros."""
    x = [*tokens(1, 7.0), ROUNDED, [0.0] * D]
    ticket = world.dispatch(2, x, [[0, 1], [3, 2], [1, -1]], [[0.5, 0.25], [1.0, 0.5], [2.0, 0.0]])
    world.serve()
    world.combine(ticket)


def two_in_flight(world: Exchange) -> None:
    """Two micro-batches of two layers: one merged batch answers both, whatever is read first."""
    first = world.dispatch(1, tokens(1), [[0, 1]], [[0.5, 0.25]])
    world.tick()
    second = world.dispatch(2, tokens(2, 3.0), [[1, 2], [3, 0]], [[1.0, 0.5], [0.25, 2.0]])
    world.serve()
    world.combine(second)
    world.combine(first)


def unknown_expert(world: Exchange) -> None:
    """An expert that has left since the client learnt of it: a status and a text."""
    world.experts.hold({(1, 0), (1, 2)})
    world.dispatch(1, tokens(2), [[0, 3], [1, 2]], [[0.5, 0.25], [1.0, 0.5]])
    world.serve()


SCRIPTS: dict[str, tuple[Callable[[Exchange], None], dict[str, Any]]] = {
    "partial": (partial, {"max_micro_batches": 1}),
    "exact": (exact, {"max_micro_batches": 1, "combine": "exact"}),
    "bf16": (bf16, {"max_micro_batches": 1, "wire_dtype": "bf16", "reply_dtype": "bf16"}),
    "fp8": (fp8, {"max_micro_batches": 1, "wire_dtype": "fp8"}),
    "two_in_flight": (two_in_flight, {"max_micro_batches": 2}),
    "unknown_expert": (unknown_expert, {"max_micro_batches": 1}),
}


def run(name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Run one script; return its trace, and the windows as they lie at its end."""
    script, options = SCRIPTS[name]
    world = Exchange(**options)
    try:
        script(world)
        trace = {
            "about": (script.__doc__ or "").strip(),
            "client": f"{CLIENT:016x}",
            "server": f"{SERVER:016x}",
            "fill": f"{FILL:02x}",
            "spec": world.spec.to_json(),
            "bytes": {name: len(view) for name, view in world.windows.items()},
            "events": world.events,
        }
        return trace, {name: bytes(view) for name, view in world.windows.items()}
    finally:
        world.close()


def record() -> None:
    """Write every trace."""
    TRACES.mkdir(exist_ok=True)
    for name in SCRIPTS:
        trace, _ = run(name)
        (TRACES / f"{name}.json").write_text(json.dumps(trace, indent=1) + "\n")


if __name__ == "__main__":
    record()
