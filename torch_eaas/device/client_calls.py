"""One dispatch of a client on a device: its inputs, and the launches of its stages.

Shape suffixes: see ``ops/pair_table.py``; T tokens, K experts per token, D hidden, d FP8 scales
of a token, E experts of a layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from torch_eaas.client_turns import Turn
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig
from torch_eaas.device.client_tables import DeviceTables
from torch_eaas.device.client_words import Failure, LaneWords, StepWords
from torch_eaas.device.puts import Puts
from torch_eaas.errors import ConfigError
from torch_eaas.ops.add_replies import add_replies
from torch_eaas.ops.choose_replicas import choose_replicas
from torch_eaas.ops.launching import FLOATS
from torch_eaas.ops.pair_table import ClientTables
from torch_eaas.ops.read_text import read_text
from torch_eaas.ops.row_quantizer import quantize_rows
from torch_eaas.ops.share_tokens import share_tokens
from torch_eaas.ops.signal import wait_free, wait_replies
from torch_eaas.ops.write_requests import Shares, write_requests
from torch_eaas.row_views import TORCH_DTYPES

LOOKS = 10**9
"""Looks at a word before a wait ends: more than there is time for, where there is a clock."""

MAX_BLOCKS = 32
"""Thread blocks that share the payload of one pair."""

_INDEX_DTYPES = (torch.int32, torch.int64)


class DeviceCall:
    """One dispatch between its two halves.

    Args:
        layer: The layer.
        num_experts: E.
        micro_batch: Which slot of each pair it uses.
        dtype: The caller's dtype, which the result will have.
        x_TD: The tokens in wire format.
        scales_Td: Their scales, if that is FP8.
        ids_TK: int32; -1 and E mean no expert.
        weights_TK: fp32.
        words: What its stages write for each other.
        lane: Its part of them.
        in_step: Whether it is part of a step: then the tables stay as they are until its end.
        done: Called once it is over.
    """

    def __init__(
        self,
        layer: int,
        num_experts: int,
        *,
        micro_batch: int,
        dtype: torch.dtype,
        x_TD: Tensor,
        scales_Td: Tensor | None,
        ids_TK: Tensor,
        weights_TK: Tensor,
        words: StepWords,
        lane: LaneWords,
        in_step: bool,
        done: Callable[[], None],
    ) -> None:
        self.layer = layer
        self.num_experts = num_experts
        self.micro_batch = micro_batch
        self.dtype = dtype
        self.x_TD = x_TD
        self.scales_Td = scales_Td
        self.ids_TK = ids_TK
        self.weights_TK = weights_TK
        self.words = words
        self.lane = lane
        self.in_step = in_step
        self.pairs_E: Tensor | None = None
        """The pair that was asked for each expert, int32."""
        self.shares: Shares | None = None
        self.places_PT: Tensor | None = None
        self.ticket: weakref.ref[Tensor] | None = None
        self.turn: Turn | None = None
        self._done = done

    def release(self) -> None:
        """Let the next dispatch of this micro-batch begin."""
        self._done()


def check_inputs(
    config: ClientConfig, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> None:
    """Refuse what no kernel may see; nothing here looks at what lies on the device.

    Raises:
        ConfigError: Names what does not fit.
    """
    hidden, top_k = config.hidden_size, config.top_k
    shape = tuple(x_TD.shape)
    if len(shape) != 2 or shape[1] != hidden or x_TD.dtype not in FLOATS:
        raise ConfigError(
            f"layer {layer}: hidden states must be (T, {hidden}) in fp32, bf16 or fp16, "
            f"got {shape} in {x_TD.dtype}"
        )
    expected = (shape[0], top_k)
    if ids_TK.shape != expected or weights_TK.shape != expected:
        raise ConfigError(
            f"layer {layer}: expert ids and weights must be {expected}, "
            f"got {tuple(ids_TK.shape)} and {tuple(weights_TK.shape)}"
        )
    if ids_TK.dtype not in _INDEX_DTYPES:
        raise ConfigError(
            f"layer {layer}: expert ids must be int32 or int64, got {ids_TK.dtype}; cast them"
        )
    if shape[0] > config.max_tokens:
        raise ConfigError(
            f"layer {layer}: {shape[0]} tokens at once are more than max_tokens "
            f"{config.max_tokens}, and the device path splits no batch; raise max_tokens here and "
            f"at the servers, or run fewer at once: with transformers, a prompt in parts by "
            f"generate(prefill_chunk_size=...)"
        )


def to_wire(x_TD: Tensor, wire_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return tokens in wire format, and their scales if that is FP8."""
    x_TD = x_TD.detach().contiguous()
    if wire_dtype == torch.float8_e4m3fn:
        return quantize_rows(x_TD)
    return x_TD.to(wire_dtype), None


class DeviceStages:
    """Launches the stages of dispatches: one launch each, whatever the number of servers.

    Args:
        config: The client's options.
        tables: What the kernels know.
        device: Where they run.
        transport: How servers are reached.
    """

    def __init__(
        self,
        config: ClientConfig,
        tables: DeviceTables,
        device: torch.device,
        transport: Transport,
    ) -> None:
        self._tables = tables
        self._device = device
        # wakes servers that are threads of this process
        self._ring = transport.ring
        self._puts = Puts(transport, device)
        self._is_exact = config.combine == "exact"
        self._reply_dtype = TORCH_DTYPES[config.reply_dtype]
        self._wait_us = max(1, int(config.graph_wait.total_seconds() * 1e6))
        self._num_pairs = len(tables.pairs_PC)
        # each micro-batch has a slot of its own in every pair
        self._client_tables = [
            ClientTables(
                tables.pairs_PC,
                torch.full((self._num_pairs,), slot, dtype=torch.int64, device=device),
                tables.words_PS,
            )
            for slot in range(config.max_micro_batches)
        ]
        shape = (config.max_tokens, config.hidden_size)
        self._zeros = {dtype: torch.zeros(shape, dtype=dtype, device=device) for dtype in FLOATS}
        self._open_gate = torch.zeros(1, dtype=torch.int64, device=device)
        if device.type == "cuda":
            self.load_what_failures_need()

    def load_what_failures_need(self) -> None:
        """Compile and load the kernels that no good step runs: a failover has no time for it."""
        tables = self._client_tables[0]
        read_text(tables, 0, 0)
        nowhere_PT = torch.full((self._num_pairs, 1), -1, dtype=torch.int32, device=self._device)
        sum_TD = self._zeros[torch.float32][:1]
        add_replies(tables, nowhere_PT, self._open_gate, sum_TD, reply_dtype=self._reply_dtype)

    def send(self, call: DeviceCall) -> None:
        """Choose replicas, share the tokens, wait for the slots, and write the requests."""
        lane, layer = call.lane, call.layer
        holders_EH = self._tables.holders_of(layer, call.num_experts)
        if holders_EH.shape[1] > 1:
            call.pairs_E = choose_replicas(call.ids_TK, holders_EH, self._num_pairs)
        else:
            only_E = holders_EH.view(-1)
            call.pairs_E = only_E if call.in_step else only_E.clone()
        call.shares, call.places_PT = share_tokens(
            *(call.ids_TK, call.weights_TK, call.pairs_E, lane.abort, self._num_pairs),
            layer=layer,
        )
        tables = self._client_tables[call.micro_batch]
        wait_free(
            *(tables, call.shares.counts_P, lane.gate, lane.arrivals_P, lane.abort),
            lane.outcomes_PO,
            layer=layer,
            timeout_us=self._wait_us,
            looks=LOOKS,
        )
        write_requests(
            *(tables, call.shares, call.x_TD, lane.gate, lane.arrivals_P),
            layer=layer,
            version=self._tables.version,
            budget_us=self._wait_us,
            blocks=min(len(call.x_TD), MAX_BLOCKS if call.x_TD.is_cuda else 2),
            scales_Nd=call.scales_Td,
        )
        self._puts.send_requests(tables, self._tables.puts_PQ, call.shares.counts_P, lane.gate)
        self._ring()

    def wait(self, call: DeviceCall) -> None:
        """Wait for the answers."""
        lane = call.lane
        assert call.shares is not None
        wait_replies(
            *(self._client_tables[call.micro_batch], call.shares.counts_P),
            *(lane.gate, lane.arrivals_P, lane.abort, lane.outcomes_PO),
            layer=call.layer,
            timeout_us=self._wait_us,
            looks=LOOKS,
        )

    def add(self, call: DeviceCall, add_TD: Tensor | None) -> Tensor:
        """Return the sum of the answers and ``add_TD``, ``(T, D)`` in the caller's dtype."""
        assert call.places_PT is not None
        if add_TD is None:
            add_TD = self._zeros[call.dtype][: len(call.x_TD)]
        elif add_TD.dtype != call.dtype:
            # nothing is rounded before the whole sum is
            add_TD = add_TD.float()
        return self._sum(call, call.places_PT, call.lane.gate, add_TD).to(call.dtype)

    def add_some(self, call: DeviceCall, answered_P: Tensor, sum_TD: Tensor | None) -> Tensor:
        """Add the answers of some pairs, in fp32, and ask nobody for their experts again.

        Args:
            call: A call of which these pairs have answered.
            answered_P: Which they are, bool.
            sum_TD: What was added before.
        """
        assert call.places_PT is not None
        assert call.pairs_E is not None
        if sum_TD is None:
            sum_TD = self._zeros[torch.float32][: len(call.x_TD)]
        places_PT = call.places_PT.where(answered_P[:, None], -1).contiguous()
        sum_TD = self._sum(call, places_PT, self._open_gate, sum_TD)
        is_expert_TK = (call.ids_TK >= 0) & (call.ids_TK < call.num_experts)
        pairs_TK = call.pairs_E[call.ids_TK.where(is_expert_TK, 0).long()]
        is_done_TK = is_expert_TK & (pairs_TK >= 0) & answered_P[pairs_TK.clamp(min=0).long()]
        call.ids_TK = call.ids_TK.masked_fill(is_done_TK, -1)
        return sum_TD

    def text(self, failure: Failure) -> str:
        """Return what the server that refused a request said."""
        return read_text(self._client_tables[failure.micro_batch], failure.pair, failure.size)

    def _sum(self, call: DeviceCall, places_PT: Tensor, gate: Tensor, add_TD: Tensor) -> Tensor:
        return add_replies(
            self._client_tables[call.micro_batch],
            places_PT,
            gate,
            add_TD.detach().contiguous(),
            reply_dtype=self._reply_dtype,
            exact_ids_TK=call.ids_TK if self._is_exact else None,
            pairs_E=call.pairs_E if self._is_exact else None,
        )
