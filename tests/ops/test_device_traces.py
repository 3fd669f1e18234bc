"""The kernels and their twins write byte for byte what the host drivers' traces say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typing_extensions import override

from tests.ops.device_ends import DeviceClient, DeviceServer, Part, Windows
from tests.protocol.record_traces import CLIENT, SCRIPTS, TRACES, E, Exchange
from torch_eaas.ops.signal import Waited
from torch_eaas.protocol.layout import HEADER_BYTES, Status
from torch_eaas.protocol.slots import ClientSlots

FIRST_BUDGET_US, BUDGET_US = 60_000_000, 1_000_000
HERE = 1
"""The pair lies in the second of three rows."""


class DeviceExchange(Exchange):
    """The same scripts: the drivers shake hands, and the device path's ops do all the rest."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        windows = Windows(self.windows["request"], self.windows["reply"], CLIENT, 1)
        self._device_client = DeviceClient(self.spec)
        self._device_client.open(HERE, windows)
        self._device_server = DeviceServer(self.spec, self._held(), E)
        self._device_server.open(HERE, windows)
        self._scanned_at = self._now
        self._slots = ClientSlots(self.spec.slots)
        self._budget_us = FIRST_BUDGET_US

    @override
    def dispatch(
        self, layer: int, x: list[list[float]], ids: list[list[int]], weights: list[list[float]]
    ) -> Any:
        slot = self._slots.take()
        assert slot is not None
        # the number of experts means none, and travels as -1
        sent_ids = [[-1 if i == E else i for i in row] for row in ids]
        part = Part(slot, range(len(x)), sent_ids, weights)
        counts_P = self._device_client.send(
            layer, torch.tensor(x), {HERE: part}, budget_us=self._budget_us
        )
        self._note(f"client dispatches {len(x)} tokens to layer {layer}")
        return slot, counts_P

    @override
    def serve(self) -> None:
        # microseconds since the last scan, so that they are rounded where the host rounds them
        last, self._scanned_at = self._scanned_at, self._now
        self._device_server.tables.scanned_P[HERE] = 0
        self._device_server.hold(self._held())

        def work() -> None:
            self.tick()
            self.tick()

        answered = self._device_server.step(lambda: int((self._now - last) * 1e6), work)
        self._note(f"server answers {len(answered)} requests")

    @override
    def combine(self, ticket: Any) -> None:
        slot, counts_P = ticket
        count = int(counts_P[HERE])
        client = self._device_client
        client.tables.slots_P[HERE] = slot
        waited, replies_PF = client.wait(counts_P, looks=1)
        assert waited == [Waited.NOTHING, Waited.ARRIVED, Waited.NOTHING]
        assert replies_PF[HERE, 4:6].tolist() == [Status.OK, count]
        self._budget_us = BUDGET_US
        rows = client.rows(HERE, slot, count).float()
        rows_TD = rows.sum(1) if self.spec.combine == "exact" else rows
        self._slots.release(slot)
        result = [" ".join(map(str, row)) for row in rows_TD.tolist()]
        self._note("client combines", result=result)

    def _held(self) -> dict[tuple[int, int], float]:
        keys = [(layer, e) for layer, ids in self.experts.holdings.items() for e in ids]
        return {(layer, expert): float(layer + expert) for layer, expert in keys}


def played(name: str) -> DeviceExchange:
    script, options = SCRIPTS[name]
    world = DeviceExchange(**options)
    play: Callable[[Exchange], None] = script
    play(world)
    return world


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "unknown_expert"])
def test_the_device_paths_ops_write_what_was_recorded(name: str, implementation: str) -> None:
    recorded = json.loads((TRACES / f"{name}.json").read_text())
    world = played(name)
    for event, expected in zip(world.events, recorded["events"], strict=True):
        assert event == expected
    world.close()


def test_a_refusal_differs_from_the_hosts_in_its_text_alone(implementation: str) -> None:
    recorded = json.loads((TRACES / "unknown_expert.json").read_text())
    world = played("unknown_expert")
    assert world.events[0] == recorded["events"][0]
    ours, theirs = world.events[1], recorded["events"][1]
    assert ours["what"] == theirs["what"]
    headers = []
    for event in (ours, theirs):
        writes = {write["part"]: bytes.fromhex(write["hex"]) for write in event["writes"]}
        assert writes["slot 0 word"] == b"\x02\x01" + bytes(6)
        headers.append(writes["slot 0 header"])
    text = b"an expert of this layer is not held here"
    # size is the text's
    assert headers[0][:36] == headers[1][:36]
    assert headers[0][36:40] == len(text).to_bytes(4, "little")
    assert headers[0][40:] == headers[1][40:]
    at = world.spec.reply_slot(0) + HEADER_BYTES
    assert bytes(world.windows["reply"][at : at + len(text)]) == text
    assert set(world.windows["reply"][at + len(text) : world.spec.reply_slot(1)]) == {0xA5}
    world.close()
