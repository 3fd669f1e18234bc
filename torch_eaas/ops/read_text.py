"""The client reads the text of an error where it lies in its window, after a step has failed.

Shape suffixes: see ``pair_table``; B bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_eaas.ops.launching import define_op, on_device
from torch_eaas.ops.pair_table import ClientTables
from torch_eaas.ops.reference_client import MAX_TEXT, read_text_ref
from torch_eaas.ops.windows import BEHIND_HEADER, REPLY_SLOT_BYTES, of_pair, reply_slot_at


def read_text(tables: ClientTables, pair: int, size: int) -> str:
    """Return the text of a pair's answer; waits for the device.

    Args:
        tables: The client's pairs; the answer lies in the slot that the request took.
        pair: The pair's row.
        size: Bytes of the text, as the answer's header says; at most 4096 are read.

    Example:
        An answer of 5 bytes ``b"full!"`` gives ``"full!"``.
    """
    text_B: Tensor = _op(tables.pairs_PC, tables.slots_P, pair, size)
    return bytes(text_B[: max(0, size)].cpu().numpy()).rstrip(b"\0").decode(errors="replace")


def launch(pairs_PC: Tensor, slots_P: Tensor, pair: int, size: int) -> Tensor:
    """Run the kernel: one block."""
    text_B = _fake(pairs_PC)
    with on_device(pairs_PC):
        _text_kernel[(1,)](pairs_PC, slots_P, text_B, pair, size, BYTES=MAX_TEXT)
    return text_B


def _fake(pairs_PC: Tensor, *_: object) -> Tensor:
    return pairs_PC.new_empty(MAX_TEXT, dtype=torch.uint8)


@triton.jit(do_not_specialize=["pair", "size"])
def _text_kernel(
    pairs_PC: tl.tensor,
    slots_P: tl.tensor,
    text_B: tl.tensor,
    pair: tl.tensor,
    size: tl.tensor,
    BYTES: tl.constexpr,
) -> None:
    """Copy what there is of the text, and 0 behind it."""
    slot = tl.load(slots_P + pair)
    byte = tl.arange(0, BYTES)
    # the header is a peer's, and what it says may be anything
    room = of_pair(pairs_PC, pair, REPLY_SLOT_BYTES) - BEHIND_HEADER
    is_text = (byte < size) & (byte < room)
    at = (reply_slot_at(pairs_PC, pair, slot) + BEHIND_HEADER).to(tl.pointer_type(tl.uint8))
    tl.store(text_B + byte, tl.load(at + byte, mask=is_text, other=0))


_op = define_op(
    "read_text(Tensor pairs_PC, Tensor slots_P, int pair, int size) -> Tensor",
    kernel=launch,
    twin=read_text_ref,
    fake=_fake,
)
