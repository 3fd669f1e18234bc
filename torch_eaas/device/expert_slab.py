"""One device server's experts: fixed slots of weights on a device, and who is in which.

Shape legend: S slots, L layers, E experts of a layer, D hidden, I intermediate, P = I padded to
whole blocks, R packed rows, M tokens with the empty places between them, d FP8 scales of a token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torch_eaas.config import Storage, check_at_least, check_choice
from torch_eaas.device.slab_memory import COPY_S, SlabMemory
from torch_eaas.device.stream import DeviceStream, Mirror, check_device
from torch_eaas.errors import ConfigError
from torch_eaas.experts import STORAGE_DTYPES, ExpertWeights, check_weights
from torch_eaas.ops.activation import swiglu, swiglu_quantize
from torch_eaas.ops.active_groups import ActiveGroups
from torch_eaas.ops.casting import cast_rows
from torch_eaas.ops.gemm import check_multiplies_fp8, grouped_gemm, grouped_gemm_fp8
from torch_eaas.ops.row_dequantizer import dequantize_rows
from torch_eaas.ops.row_quantizer import quantize_rows
from torch_eaas.placement import holdings_from


class ExpertSlab:
    """Room for some experts on a device; they come and go while a server runs them.

    A new expert's weights are copied into a free slot, and only then does the table name it; a slot
    is free again when no iteration under way can read it any more. So nothing is captured anew.

    Args:
        hidden_size: D.
        intermediate_size: I.
        slots: S, the most experts at once, of all layers. Replacing one takes a free slot too.
        max_layers: L: layers 0 to L - 1 may be held.
        max_experts: E: experts 0 to E - 1 of each.
        storage: How weights are kept; fp8 is e4m3 with a scale for each block of 128 x 128.
        device: Where they lie; on a CPU the ops' plain twins run them.

    Raises:
        ConfigError: A size is below 1, the device is not there, or has too little memory.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        slots: int,
        max_layers: int,
        max_experts: int,
        storage: Storage = "bf16",
        device: torch.device | str = "cuda",
    ) -> None:
        for name, value in (
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
            ("slots", slots),
            ("max_layers", max_layers),
            ("max_experts", max_experts),
        ):
            check_at_least(name, value, 1)
        check_choice("storage", storage, Storage)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_slots, self.storage = slots, storage
        self.device = check_device(device)
        if storage == "fp8" and self.device.type == "cuda":
            check_multiplies_fp8(self.device)
        # clients of this process, and what else computes here, may spin on their streams
        self.stream = DeviceStream(self.device, is_first=True)
        """Where weights and table are read."""
        self._memory = SlabMemory(hidden_size, intermediate_size, slots, storage, self.device)
        table_LE = torch.full((max_layers, max_experts), -1, dtype=torch.int32)
        self._table = Mirror(table_LE.to(self.device), self.stream)
        self._changing = threading.Lock()
        self._slots: dict[tuple[int, int], int] = {}
        self._free = list(range(slots))[::-1]
        self._settle: Callable[[], None] = self._settle_alone

    @property
    def table(self) -> Tensor:
        """The slot of each expert of each layer on the device, ``(L, E)`` int32; -1: not held."""
        return self._table.device

    @property
    def holdings(self) -> dict[int, tuple[int, ...]]:
        """Layer to the sorted ids of the experts held there."""
        return holdings_from(self._slots)

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        return len(self._free)

    def add(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """Hold one more expert, or replace the one that is held; see ``update``."""
        self.update({(layer, expert): weights})

    def update(self, experts: Mapping[tuple[int, int], ExpertWeights]) -> None:
        """Hold more experts, in one step; returns when the next iteration runs them.

        Raises:
            ConfigError: No slot is free, a matrix has another shape, or the table has no place for
                a layer or an expert.
        """
        with self._changing:
            for (layer, expert), weights in experts.items():
                self._check(layer, expert, weights)
            self._check_room(len(experts))
            taken = dict(zip(experts, self._free[::-1], strict=False))
            for key, slot in taken.items():
                self._memory.load(slot, experts[key])
            self._free = self._free[: len(self._free) - len(taken)]
            self._change(taken)

    def remove(self, layer: int, expert: int) -> None:
        """Hold an expert no more; ConfigError if it is not held."""
        with self._changing:
            if (layer, expert) not in self._slots:
                raise ConfigError(f"layer {layer}, expert {expert} is not held")
            self._change({(layer, expert): -1})

    def attach(self, settle: Callable[[], None]) -> None:
        """Let a server read this slab: ``settle`` returns when no iteration reads an older table.

        Raises:
            ConfigError: Another server reads it.
        """
        if self._settle != self._settle_alone:
            raise ConfigError("this slab belongs to a server already; make one for each server")
        self._settle = settle

    def detach(self) -> None:
        """Belong to no server any more: none reads it from now on."""
        self._settle = self._settle_alone

    def push(self) -> None:
        """Enqueue the table's copy on the current stream, if it changed."""
        self._table.push()

    def run(
        self,
        x_MD: Tensor,
        rows_R: Tensor,
        counts_S: Tensor,
        num_tokens_S: Tensor,
        *,
        top_k: int,
        block_rows: int,
        scales_Md: Tensor | None = None,
    ) -> Tensor:
        """Enqueue the experts of packed rows.

        Args:
            x_MD: Hidden states, ``(M, D)``, of any wire dtype: the tokens of requests, each with
                room for as many.
            rows_R: What ``ops.pack`` gave, ``(R,)`` int32.
            counts_S: Rows of each slot, ``(S,)`` int32.
            num_tokens_S: Tokens of each request, int32.
            top_k: K.
            block_rows: Rows of a GEMM's tile.
            scales_Md: Their scales, ``(M, ceil(D / 128))`` fp32, if they are FP8. FP8 experts take
                both as they are.

        Returns:
            ``(R, D)``, fp32 or bf16; rows that belong to no expert hold anything.
        """
        groups = ActiveGroups.of(counts_S, block_rows)
        gate_up, down = self._memory.gate_up, self._memory.down
        if self.storage == "fp8":
            if scales_Md is None:
                x_MD, scales_Md = quantize_rows(x_MD, num_tokens_S=num_tokens_S)
            x = (x_MD, scales_Md)
            inner_R2P = grouped_gemm_fp8(x, gate_up, groups, rows_R=rows_R, gather_div=top_k)
            return grouped_gemm_fp8(swiglu_quantize(inner_R2P, groups.totals_3), down, groups)
        dtype = STORAGE_DTYPES[self.storage]
        if scales_Md is None:
            x_MD = cast_rows(x_MD, dtype, num_tokens_S)
        else:
            x_MD = dequantize_rows(x_MD, scales_Md, dtype=dtype, num_tokens_S=num_tokens_S)
        inner_R2P = grouped_gemm(x_MD, gate_up[0], groups, rows_R=rows_R, gather_div=top_k)
        return grouped_gemm(swiglu(inner_R2P, groups.totals_3), down[0], groups)

    def _check(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        layers, experts = self.table.shape
        if not (0 <= layer < layers and 0 <= expert < experts):
            raise ConfigError(
                f"layer {layer}, expert {expert}: this slab's table has layers 0 to {layers - 1} "
                f"and experts 0 to {experts - 1}; raise max_layers or max_experts"
            )
        check_weights(layer, expert, weights, self.hidden_size, self.intermediate_size)

    def _check_room(self, wanted: int) -> None:
        if wanted > len(self._free):
            raise ConfigError(
                f"{wanted} experts need as many free slots, and of this slab's {self.num_slots} "
                f"{len(self._free)} are free; raise slots (torch-eaas server --room), or remove "
                f"experts first"
            )

    def _change(self, changes: Mapping[tuple[int, int], int]) -> None:
        """Put experts into other slots, -1 for none; free theirs as soon as nobody reads them."""
        left = [self._slots[key] for key in changes if key in self._slots]
        wanted_LE = self._table.wanted.clone()
        for key, slot in changes.items():
            wanted_LE[key] = slot
        self._table.wanted = wanted_LE
        # replaced, not changed: another thread may be telling what is held
        slots = {**self._slots, **changes}
        self._slots = {key: slot for key, slot in slots.items() if slot >= 0}
        self._settle()
        self._free += left

    def _settle_alone(self) -> None:
        with self.stream.current():
            self.push()
        self.stream.mark().wait(COPY_S)
