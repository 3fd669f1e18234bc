"""One iteration of a device server, from the slots' words to the answers' words, as launches.

Which launches there are and their shapes never change; what they do follows from counts and tables
in device memory. So they are captured once and replayed.

Shape suffixes: P pairs, S slots of a pair, R requests, T tokens of a request, K experts per token,
D hidden, d FP8 scales of a token, N packed rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_eaas.config import Storage, check_at_least
from torch_eaas.device.expert_slab import ExpertSlab
from torch_eaas.device.puts import Puts
from torch_eaas.device.stream import Mirror
from torch_eaas.errors import ConfigError
from torch_eaas.experts import STORAGE_DTYPES
from torch_eaas.ops.answer_counts import NUM_COUNTERS, count_answers
from torch_eaas.ops.clock import read_clock
from torch_eaas.ops.combining import combine_rows
from torch_eaas.ops.gemm_config import choose_block_rows
from torch_eaas.ops.packing import pack
from torch_eaas.ops.pair_table import ServerTables
from torch_eaas.ops.put_table import NO_PUT
from torch_eaas.ops.read_hidden import read_hidden
from torch_eaas.ops.read_requests import Requests, read_requests
from torch_eaas.ops.slot_scan import check_scanned, scan_slots
from torch_eaas.ops.write_replies import Answers, refusal_texts, write_replies
from torch_eaas.protocol.layout import DTYPE_BYTES, PairSpec
from torch_eaas.row_views import TORCH_DTYPES

logger = logging.getLogger(__name__)

EXACT_BLOCK_ROWS = 16
"""In ``exact`` mode all servers choose the same tile: its width is what a row's bits depend on."""

_ENOUGH_LOOKS = 1 << 30
"""On a GPU its timer ends the wait; the interpreter has none, and looks once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSizes:
    """What an iteration is captured for."""

    spec: PairSpec
    """What every pair agrees on; its slots and tokens are the most a pair may have."""

    max_pairs: int
    """Most pairs at once."""

    max_rows: int
    """Most (token, expert) rows of one batch; one request always fits."""

    max_requests: int
    """Most requests of one batch."""

    wait_us: int = 50
    """How long the first kernel waits for a request."""

    copiers: int = 8
    """Thread blocks that share the copying of one request's rows."""

    def __post_init__(self) -> None:
        for name in ("max_pairs", "max_rows", "max_requests", "copiers"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("wait_us", self.wait_us, 0)
        check_scanned(self.max_pairs, self.spec.slots)

    @property
    def capacity(self) -> int:
        """Most packed rows of one batch."""
        return max(self.max_rows, self.spec.max_tokens * self.spec.top_k)

    def batch_bytes(self, storage: Storage) -> int:
        """Return what hidden states and answers of the largest batch take; all else is small.

        Args:
            storage: How weights are kept, and tokens where they travel otherwise.

        Example:
            DeepSeek-R1's 64 requests of 128 tokens, fp32 both ways, with bf16 weights: 560 MiB; in
            `exact` mode, where 8 rows answer a token, 2128 MiB.
        """
        spec, kept = self.spec, STORAGE_DTYPES[storage]
        a_number = (
            DTYPE_BYTES[spec.wire_dtype] + spec.rows_per_token * DTYPE_BYTES[spec.reply_dtype]
        )
        if TORCH_DTYPES[spec.wire_dtype] != kept:
            a_number += kept.itemsize
        return self.max_requests * spec.max_tokens * spec.hidden_size * a_number


class DeviceIteration:
    """The launches and every tensor that they share.

    Args:
        slab: The experts.
        sizes: What is captured.
        puts: The stage that sends what was staged, where stores do not reach clients.

    Raises:
        ConfigError: The GPU has too little memory for the largest batch.
    """

    def __init__(self, slab: ExpertSlab, sizes: IterationSizes, puts: Puts | None = None) -> None:
        spec, device = sizes.spec, slab.device
        _check_memory(sizes, slab)
        self._slab = slab
        self._sizes = sizes
        self.tables = ServerTables.empty(sizes.max_pairs, spec.slots, device)
        self.puts_PQ = torch.tensor([NO_PUT] * sizes.max_pairs, device=device)
        """The table of puts."""
        self._puts = puts
        self._open_gate = _zeros(device, torch.int64)
        self.version = Mirror(_zeros(device, torch.int64), slab.stream)
        """The newest placement that the server knows."""
        self.draining = Mirror(_zeros(device, torch.int32), slab.stream)
        """Whether every request is refused."""
        self.counters_C = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
        self.now = _zeros(device, torch.int64)
        """The device's clock in us, as the iteration began."""
        self._ended = torch.zeros_like(self.now)
        self._texts_XB = refusal_texts(device)
        self._arrivals_R = torch.zeros(sizes.max_requests, dtype=torch.int32, device=device)
        self._x_RTD = torch.zeros(
            (sizes.max_requests, spec.max_tokens, spec.hidden_size),
            dtype=TORCH_DTYPES[spec.wire_dtype],
            device=device,
        )
        self._scales_RTd: Tensor | None = None
        if spec.wire_dtype == "fp8":
            shape = (*self._x_RTD.shape[:2], spec.scales_per_token)
            self._scales_RTd = torch.zeros(shape, device=device)
        self._block_rows = EXACT_BLOCK_ROWS
        if spec.combine != "exact":
            self._block_rows = choose_block_rows(sizes.capacity, slab.num_slots)

    def run(self) -> None:
        """Enqueue one iteration on the current stream."""
        sizes, spec = self._sizes, self._sizes.spec
        read_clock(self.now)
        ready_R, tokens_R, _, started = scan_slots(
            self.tables,
            self.now,
            sizes.max_requests,
            # of K rows each; the first request is admitted all the same
            max_tokens=max(1, sizes.max_rows // spec.top_k),
            wait_us=sizes.wait_us,
            looks=_ENOUGH_LOOKS if self.now.is_cuda else 1,
        )
        requests = read_requests(
            self.tables,
            ready_R,
            started,
            self.draining.device,
            self._slab.table,
            max_tokens=spec.max_tokens,
            top_k=spec.top_k,
            tokens_R=tokens_R,
        )
        rows_ND = self._compute(ready_R, requests)
        write_replies(
            self.tables,
            Answers(ready_R, requests.statuses_R, requests.num_tokens_R, rows_ND),
            self._texts_XB,
            self._arrivals_R,
            started=started,
            version=self.version.device,
            rows_per_token=spec.rows_per_token,
            blocks=sizes.copiers,
        )
        if self._puts is not None:
            self._puts.send_replies(
                self.tables, self.puts_PQ, requests.statuses_R, ready_R, self._open_gate
            )
        # nobody waits for what follows
        read_clock(self._ended)
        count_answers(
            *(self.counters_C, requests.statuses_R, requests.num_tokens_R, started, self._ended)
        )

    def _compute(self, ready_R: Tensor, requests: Requests) -> Tensor:
        """Return the answers' rows in the pairs' reply dtype, R requests with room for T each."""
        spec, num_tokens_R = self._sizes.spec, requests.num_tokens_R
        scales_RTd = self._scales_RTd
        read_hidden(
            self.tables,
            ready_R,
            num_tokens_R,
            self._x_RTD,
            blocks=self._sizes.copiers,
            scales_RTd=scales_RTd,
        )
        rows_N, places_RTK, counts_G = pack(
            requests.ids_RTK,
            requests.layers_R,
            num_tokens_R,
            self._slab.table,
            self._slab.num_slots,
        )
        # the packed rows lie first, and there are never more
        capacity = min(self._sizes.capacity, len(rows_N))
        down_ND = self._slab.run(
            self._x_RTD.flatten(0, 1),
            rows_N[:capacity],
            counts_G,
            num_tokens_R,
            top_k=spec.top_k,
            block_rows=self._block_rows,
            scales_Md=None if scales_RTd is None else scales_RTd.flatten(0, 1),
        )
        out = combine_rows(
            down_ND,
            places_RTK.flatten(0, 1),
            requests.weights_RTK.flatten(0, 1),
            per_expert=spec.combine == "exact",
            num_tokens_S=num_tokens_R,
            out_dtype=TORCH_DTYPES[spec.reply_dtype],
        )
        return out.view(-1, spec.hidden_size)


def _check_memory(sizes: IterationSizes, slab: ExpertSlab) -> None:
    if slab.device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(slab.device)
    # what torch keeps for others to take
    free += torch.cuda.memory_reserved(slab.device) - torch.cuda.memory_allocated(slab.device)
    needed = sizes.batch_bytes(slab.storage)
    room = f"{sizes.max_requests} requests of {sizes.spec.max_tokens} tokens"
    if needed > free:
        raise ConfigError(
            f"a batch of {room} needs {needed / 2**30:.1f} GiB beside the slab, and {slab.device} "
            f"has {free / 2**30:.1f} GiB free; lower max_tokens or max_requests, or take fewer "
            f"slots of experts"
        )
    logger.info("room for a batch of %s: %.1f MiB", room, needed / 2**20)


def _zeros(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.zeros(1, dtype=dtype, device=device)
