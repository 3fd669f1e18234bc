"""A client and a server of the device path, as small as a test can have them.

Stages are the ops; plain torch are the experts, and, at the client, which server gets which token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.ops.windowed import address_of
from torch_eaas.ops import combine_rows, dequantize_rows, pack, quantize_rows
from torch_eaas.ops.pair_table import ClientTables, ServerTables, pair_row
from torch_eaas.ops.read_hidden import read_hidden
from torch_eaas.ops.read_requests import read_requests
from torch_eaas.ops.reference_client import Outcome
from torch_eaas.ops.signal import wait_free, wait_replies
from torch_eaas.ops.slot_scan import scan_slots
from torch_eaas.ops.write_replies import Answers, refusal_texts, write_replies
from torch_eaas.ops.write_requests import Shares, write_requests
from torch_eaas.protocol.layout import HEADER_BYTES, PairSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
PAIRS = 3
BLOCKS = 2
R = 4
ENOUGH_US = 10**8
"""Looks end the waits here: the interpreter has no timer."""


class Windows(NamedTuple):
    """One pair's windows and who it is of."""

    requests: memoryview
    replies: memoryview
    instance: int
    epoch: int

    def row(self, spec: PairSpec) -> Tensor:
        return torch.tensor(
            pair_row(
                spec,
                requests=address_of(self.requests),
                replies=address_of(self.replies),
                instance=self.instance,
                epoch=self.epoch,
            )
        )


class Part(NamedTuple):
    """What one pair gets of a batch."""

    slot: int
    tokens: Sequence[int]
    ids: Sequence[Sequence[int]]
    weights: Sequence[Sequence[float]]


def numbers_at(view: memoryview, dtype: torch.dtype, at: int, shape: Sequence[int]) -> Tensor:
    """Return numbers in a window where they lie."""
    count = torch.Size(shape).numel()
    return torch.frombuffer(view, dtype=dtype, count=count, offset=at).view(shape)


class DeviceClient:
    """Writes requests and waits for their answers; a step that fails closes the gates."""

    def __init__(self, spec: PairSpec) -> None:
        self.spec = spec
        self.tables = ClientTables.empty(PAIRS, spec.slots)
        self.abort = torch.zeros(1, dtype=torch.int64)
        self._gate = torch.zeros(1, dtype=torch.int64)
        self.outcomes_PO = torch.zeros(PAIRS, len(Outcome), dtype=torch.int64)
        self._layer = 0
        self._windows: dict[int, Windows] = {}
        self._arrivals_P = torch.zeros(PAIRS, dtype=torch.int32)
        self._version = torch.ones(1, dtype=torch.int64)

    def open(self, p: int, windows: Windows) -> None:
        """Use a pair from now on."""
        self._windows[p] = windows
        self.tables.pairs_PC[p] = windows.row(self.spec)
        self.tables.words_PS[p] = 0

    def begin(self) -> None:
        """Begin a step, as a graph's first node does."""
        for word in (self.abort, self._gate, self.outcomes_PO):
            word.zero_()

    def send(
        self, layer: int, x: Tensor, parts: Mapping[int, Part], *, budget_us: int, looks: int = 100
    ) -> Tensor:
        """Wait for the slots and write the requests; return the tokens of each pair."""
        spec = self.spec
        shape = (PAIRS, spec.max_tokens, spec.top_k)
        shares = Shares(
            torch.zeros(PAIRS, dtype=torch.int32),
            # beyond a pair's count there is rubbish
            torch.full(shape[:2], 10**6, dtype=torch.int32),
            torch.full(shape, -77, dtype=torch.int32),
            torch.full(shape, float("nan")),
        )
        for p, part in parts.items():
            count = len(part.tokens)
            self.tables.slots_P[p] = part.slot
            shares.counts_P[p] = count
            shares.tokens_PT[p, :count] = torch.tensor(part.tokens)
            shares.ids_PTK[p, :count] = torch.tensor(part.ids)
            shares.weights_PTK[p, :count] = torch.tensor(part.weights)
        x_wire, scales_Nd = x.to(DTYPES[spec.wire_dtype]), None
        if spec.wire_dtype == "fp8":
            x_wire, scales_Nd = quantize_rows(x)
        wait_free(
            self.tables,
            shares.counts_P,
            self._gate,
            self._arrivals_P,
            self.abort,
            self.outcomes_PO,
            layer=layer,
            timeout_us=ENOUGH_US,
            looks=looks,
        )
        self._layer = layer
        write_requests(
            self.tables,
            shares,
            x_wire,
            self._gate,
            self._arrivals_P,
            layer=layer,
            version=self._version,
            budget_us=budget_us,
            blocks=BLOCKS,
            scales_Nd=scales_Nd,
        )
        # no stage leaves an arrival behind
        assert self._arrivals_P.tolist() == [0] * PAIRS
        return shares.counts_P

    def wait(self, counts_P: Tensor, looks: int) -> tuple[list[int], Tensor]:
        """Wait for the answers; return what became of each in this layer, and the headers."""
        wait_replies(
            self.tables,
            counts_P,
            self._gate,
            self._arrivals_P,
            self.abort,
            self.outcomes_PO,
            layer=self._layer,
            timeout_us=ENOUGH_US,
            looks=looks,
        )
        return self.outcomes_PO[:, 0].tolist(), self.outcomes_PO[:, 2:]

    def rows(self, p: int, slot: int, count: int) -> Tensor:
        """Return an answer's rows where they lie."""
        spec = self.spec
        at = spec.reply_slot(slot) + HEADER_BYTES
        shape = (count, *spec.rows_shape[1:])
        return numbers_at(self._windows[p].replies, DTYPES[spec.reply_dtype], at, shape)

    def text(self, p: int, slot: int, size: int) -> str:
        """Return an error's text."""
        at = self.spec.reply_slot(slot) + HEADER_BYTES
        return bytes(self._windows[p].replies[at : at + size]).decode()


class DeviceServer:
    """Scans, takes, computes and answers; expert e of layer n multiplies by ``scales[n, e]``."""

    def __init__(
        self, spec: PairSpec, scales: Mapping[tuple[int, int], float], num_experts: int
    ) -> None:
        self.spec = spec
        self.tables = ServerTables.empty(PAIRS, spec.slots)
        self._num_experts = num_experts
        self._arrivals_R = torch.zeros(R, dtype=torch.int32)
        self._texts_XB = refusal_texts()
        self._zero = torch.zeros(1, dtype=torch.int64)
        self.hold(scales)

    def hold(self, scales: Mapping[tuple[int, int], float]) -> None:
        """Hold these experts from now on."""
        layers = 1 + max(layer for layer, _ in scales)
        self._groups_LE = torch.full((layers, self._num_experts), -1, dtype=torch.int32)
        for group, key in enumerate(scales):
            self._groups_LE[key] = group
        self._scales = torch.tensor(list(scales.values()))

    def open(self, p: int, windows: Windows) -> None:
        """Serve a pair from now on."""
        self.tables.pairs_PC[p] = windows.row(self.spec)
        self.tables.book_3PS[:, p] = 0

    def step(self, clock: Callable[[], int], work: Callable[[], None] = lambda: None) -> list[int]:
        """Serve what is ready; return the statuses of what was answered.

        Args:
            clock: The time in us.
            work: Called once where there are experts to run.
        """
        spec = self.spec
        started = torch.tensor([clock()])
        ready_R, tokens_R, num_ready, _ = scan_slots(self.tables, started, R)
        requests = read_requests(
            self.tables,
            ready_R,
            started,
            self._zero.int(),
            self._groups_LE,
            max_tokens=spec.max_tokens,
            top_k=spec.top_k,
            tokens_R=tokens_R,
        )
        x_RTD = torch.full((R, spec.max_tokens, spec.hidden_size), float("nan"))
        x_RTD, scales_RTd = x_RTD.to(DTYPES[spec.wire_dtype]), None
        if spec.wire_dtype == "fp8":
            scales_RTd = torch.full((R, spec.max_tokens, spec.scales_per_token), float("nan"))
        tokens_R = requests.num_tokens_R
        read_hidden(self.tables, ready_R, tokens_R, x_RTD, blocks=BLOCKS, scales_RTd=scales_RTd)
        x_ND = x_RTD.flatten(0, 1)
        if scales_RTd is not None:
            x_ND = dequantize_rows(
                x_ND, scales_RTd.flatten(0, 1), dtype=torch.float32, num_tokens_S=tokens_R
            )
        rows_N, places_RTK, counts_G = pack(
            requests.ids_RTK,
            requests.layers_R,
            requests.num_tokens_R,
            self._groups_LE,
            len(self._scales),
        )
        # the experts, where grouped GEMMs would be
        scales_N = self._scales.repeat_interleave(counts_G)
        x_ND = x_ND.float()[rows_N[: len(scales_N)].long() // spec.top_k]
        if len(scales_N):
            work()
        out = combine_rows(
            scales_N.unsqueeze(1) * x_ND,
            places_RTK.flatten(0, 1),
            requests.weights_RTK.flatten(0, 1),
            per_expert=spec.combine == "exact",
            num_tokens_S=requests.num_tokens_R,
        )
        rows_ND = out.to(DTYPES[spec.reply_dtype]).view(-1, spec.hidden_size)
        write_replies(
            self.tables,
            Answers(ready_R, requests.statuses_R, requests.num_tokens_R, rows_ND),
            self._texts_XB,
            self._arrivals_R,
            started=started,
            now=torch.tensor([clock()]),
            version=self._zero,
            rows_per_token=spec.top_k if spec.combine == "exact" else 1,
            blocks=BLOCKS,
        )
        assert self._arrivals_R.tolist() == [0] * R
        answered: list[int] = requests.statuses_R[: int(num_ready)].tolist()
        return answered
