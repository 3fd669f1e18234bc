"""The rows of a window's slots as tensors, each view made once.

Shape legend: T tokens of a request; a row is ``(D)`` or ``(K, D)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
NUMPY_DTYPES: dict[str, Any] = {
    "fp32": np.float32,
    "bf16": np.int16,
    "fp16": np.int16,
    "fp8": np.uint8,
}
"""How numpy sees the wire's numbers: it knows no bf16 and no fp8, and copies need none."""

LARGE_BYTES = 1 << 16
"""From here on a plain copy of bytes beats a tensor's, whatever it takes to get at the bytes."""


def as_numpy(rows: Tensor) -> NDArray[Any]:
    """Return contiguous rows of a wire dtype as numpy sees them: the same memory."""
    if rows.dtype == torch.float32:
        return rows.numpy()
    return rows.view(torch.int16 if rows.element_size() == 2 else torch.uint8).numpy()


class RowViews:
    """The rows of every slot of one window.

    Args:
        window: The window's bytes.
        dtype: The rows' dtype.
        shape: ``(max_tokens, D)`` or ``(max_tokens, K, D)``.
        offsets: Where each slot's rows begin, in bytes.
    """

    def __init__(
        self, window: memoryview, dtype: torch.dtype, shape: tuple[int, ...], offsets: Sequence[int]
    ) -> None:
        self._window = window
        self._dtype = dtype
        self._offsets = offsets
        count = math.prod(shape)
        self._whole = [
            torch.frombuffer(window, dtype=dtype, count=count, offset=offset).view(shape)
            for offset in offsets
        ]
        self._views: dict[tuple[int, int], Tensor] = {}
        self._arrays = [rows.numpy() for rows in self._whole] if dtype == torch.float32 else None

    def first(self, slot: int, num_tokens: int) -> Tensor:
        """Return a view of a slot's first rows; a slice costs more than a small request."""
        view = self._views.get((slot, num_tokens))
        if view is None:
            view = self._views[slot, num_tokens] = self._whole[slot][:num_tokens]
        return view

    def array(self, slot: int) -> NDArray[Any] | None:
        """Return all rows of a slot as numpy sees them; None unless they are fp32."""
        return None if self._arrays is None else self._arrays[slot]

    def store(self, slot: int, num_tokens: int, rows: Tensor) -> None:
        """Copy rows into a slot, with plain stores."""
        is_fp32 = rows.dtype == torch.float32
        if rows.dtype != self._dtype or not rows.is_contiguous():
            self.first(slot, num_tokens).copy_(rows)
        elif is_fp32 or rows.nbytes >= LARGE_BYTES:
            piece = as_numpy(rows).data.cast("B")
            at = self._offsets[slot]
            self._window[at : at + piece.nbytes] = piece
        else:
            self.first(slot, num_tokens).copy_(rows)
