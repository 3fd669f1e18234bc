"""The kernels and their twins write byte for byte what the host drivers' traces say."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from tests.ops.implementations import implementation
from tests.protocol.record_traces import CLIENT, SCRIPTS, TRACES, E, Exchange
from torch_eaas.ops.pair_table import ClientTables, ServerTables, pair_row
from torch_eaas.ops.read_requests import read_requests
from torch_eaas.ops.signal import Waited, wait_replies
from torch_eaas.ops.slot_scan import scan_slots
from torch_eaas.ops.write_replies import Answers, refusal_texts, write_replies
from torch_eaas.ops.write_requests import Shares, write_requests
from torch_eaas.protocol.layout import HEADER_BYTES, Status
from torch_eaas.protocol.slots import ClientSlots

__all__ = ["implementation"]

BLOCKS = 2
FIRST_BUDGET_US, BUDGET_US = 60_000_000, 1_000_000


class DeviceExchange(Exchange):
    """The same scripts: the drivers shake hands, and the device path's ops do all the rest."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        spec = self.spec
        addresses = {
            name: ctypes.addressof(ctypes.c_char.from_buffer(view))
            for name, view in self.windows.items()
        }
        row = pair_row(
            spec,
            requests=addresses["request"],
            replies=addresses["reply"],
            instance=CLIENT,
            epoch=1,
        )
        # the pair lies in the second of three rows
        self._client_tables = ClientTables.empty(3, spec.slots)
        self._server_tables = ServerTables.empty(3, spec.slots)
        for tables in (self._client_tables, self._server_tables):
            tables.pairs_PC[1] = torch.tensor(row)
        self._scanned_at = self._now
        self._slots = ClientSlots(spec.slots)
        self._heard = False
        self._abort = torch.zeros(1, dtype=torch.int64)
        self._gate = torch.zeros(1, dtype=torch.int64)

    @override
    def dispatch(
        self, layer: int, x: list[list[float]], ids: list[list[int]], weights: list[list[float]]
    ) -> Any:
        slot = self._slots.take()
        assert slot is not None
        self._client_tables.slots_P[1] = slot
        spec, count = self.spec, len(x)
        shape = (3, spec.max_tokens, spec.top_k)
        shares = Shares(
            torch.tensor([0, count, 0], dtype=torch.int32),
            torch.zeros(shape[:2], dtype=torch.int32),
            torch.zeros(shape, dtype=torch.int32),
            torch.zeros(shape),
        )
        shares.tokens_PT[1, :count] = torch.arange(count)
        shares.ids_PTK[1, :count] = torch.tensor([[-1 if i == E else i for i in k] for k in ids])
        shares.weights_PTK[1, :count] = torch.tensor(weights)
        arrivals_P = torch.zeros(3, dtype=torch.int32)
        write_requests(
            self._client_tables,
            shares,
            torch.tensor(x).to(torch.bfloat16 if spec.wire_dtype == "bf16" else torch.float32),
            self._gate,
            arrivals_P,
            layer=layer,
            version=torch.ones(1, dtype=torch.int64),
            budget_us=BUDGET_US if self._heard else FIRST_BUDGET_US,
            blocks=BLOCKS,
        )
        assert arrivals_P.tolist() == [0, 0, 0]
        self._note(f"client dispatches {count} tokens to layer {layer}")
        return slot, shares.counts_P

    @override
    def serve(self) -> None:
        tables, spec = self._server_tables, self.spec
        # whole microseconds since the last scan: so they are rounded where the host rounds
        tables.scanned_P[1] = 0
        scanned_at, started = self._now, self._microseconds()
        ready_R, num_ready = scan_slots(tables, started, max_requests=4)
        held_LE = self._held()
        requests_RF, statuses_R, groups_RTK, weights_RTK = read_requests(
            tables,
            ready_R,
            started,
            torch.zeros(1, dtype=torch.int32),
            held_LE,
            max_tokens=spec.max_tokens,
            top_k=spec.top_k,
        )
        rows = [torch.zeros(0, spec.hidden_size)]
        if Status.OK in statuses_R.tolist():
            self.tick()
            self.tick()
        for r, status in enumerate(statuses_R.tolist()):
            if status == Status.OK:
                count = int(requests_RF[r, 6])
                scales_TK = self._scales()[groups_RTK[r, :count].long()] * weights_RTK[r, :count]
                rows_TKD = scales_TK.unsqueeze(-1) * self._hidden(ready_R, r, count).unsqueeze(1)
                rows.append(rows_TKD if spec.combine == "exact" else rows_TKD.sum(1))
        rows_per_token = spec.top_k if spec.combine == "exact" else 1
        counts_R = requests_RF[:, 6].contiguous()
        is_ok_R = statuses_R == Status.OK
        answers = Answers(
            ready_R,
            statuses_R,
            counts_R,
            torch.where(is_ok_R, counts_R, 0).cumsum(0) * rows_per_token
            - torch.where(is_ok_R, counts_R, 0) * rows_per_token,
            torch.cat([each.reshape(-1, spec.hidden_size) for each in rows]).to(
                torch.bfloat16 if spec.reply_dtype == "bf16" else torch.float32
            ),
        )
        arrivals_R = torch.zeros(4, dtype=torch.int32)
        write_replies(
            tables,
            answers,
            refusal_texts(),
            arrivals_R,
            started=started,
            now=self._microseconds(),
            version=torch.zeros(1, dtype=torch.int64),
            rows_per_token=rows_per_token,
            blocks=BLOCKS,
        )
        assert arrivals_R.tolist() == [0] * 4
        self._scanned_at = scanned_at
        self._note(f"server answers {int(num_ready)} requests")

    @override
    def combine(self, ticket: Any) -> None:
        slot, counts_P = ticket
        self._client_tables.slots_P[1] = slot
        waited_P, replies_PF = wait_replies(
            self._client_tables, counts_P, self._gate, self._abort, timeout_us=10**6, looks=1
        )
        assert waited_P.tolist() == [Waited.NOTHING, Waited.ARRIVED, Waited.NOTHING]
        assert replies_PF[1, 4:6].tolist() == [Status.OK, int(counts_P[1])]
        self._heard = True
        spec = self.spec
        rows = self._floats("reply", spec.reply_slot(slot) + HEADER_BYTES, spec.rows_shape)
        rows_TD = rows[: int(counts_P[1])]
        if spec.combine == "exact":
            rows_TD = rows_TD.sum(1)
        self._slots.release(slot)
        result = [" ".join(map(str, row)) for row in rows_TD.tolist()]
        self._note("client combines", result=result)

    def _microseconds(self) -> Tensor:
        return torch.tensor([int((self._now - self._scanned_at) * 1e6)])

    def _held(self) -> Tensor:
        """Return the groups of the experts held: layers 0 to 2, of which 0 holds none."""
        held_LE = torch.full((3, E), -1, dtype=torch.int32)
        keys = [(layer, e) for layer, ids in self.experts.holdings.items() for e in ids]
        for group, (layer, expert) in enumerate(sorted(keys)):
            held_LE[layer, expert] = group
        return held_LE

    def _scales(self) -> Tensor:
        return torch.tensor([*self.experts.table.experts, 0.0])

    def _hidden(self, ready_R: Tensor, r: int, count: int) -> Tensor:
        spec = self.spec
        at = spec.request_slot(int(ready_R[r]) % spec.slots) + spec.hidden_offset
        return self._floats("request", at, (count, spec.hidden_size))

    def _floats(self, window: str, at: int, shape: tuple[int, ...]) -> Tensor:
        name = self.spec.wire_dtype if window == "request" else self.spec.reply_dtype
        dtype = torch.bfloat16 if name == "bf16" else torch.float32
        count = torch.Size(shape).numel()
        return (
            torch.frombuffer(self.windows[window], dtype=dtype, count=count, offset=at)
            .view(shape)
            .float()
        )


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
    assert writes["slot 0 rows or text"] != text
    # size is the text's
    assert headers[0][:36] == headers[1][:36]
    assert headers[0][36:40] == len(text).to_bytes(4, "little")
    assert headers[0][40:] == headers[1][40:]
    at = world.spec.reply_slot(0) + HEADER_BYTES
    assert bytes(world.windows["reply"][at : at + len(text)]) == text
    assert set(world.windows["reply"][at + len(text) : world.spec.reply_slot(1)]) == {0xA5}
    world.close()
