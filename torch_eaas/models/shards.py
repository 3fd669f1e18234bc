"""One safetensors file: its header, checked, and its tensors, read by ranges.

Nothing is mapped and nothing is read that was not asked for. A file that is not what it seems (cut
short, a pointer of git-lfs, a web page) is refused with its name, its size and the likely cause.
"""

import json
import os
import threading
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_eaas.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of the format that torch has."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a longer header means that the file is something else."""

_NOT_SAFETENSORS = (
    (b"version https://git-lfs", "this is a git-lfs pointer; run `git lfs pull`"),
    (b"<", "this is a web page, not the file; download it again, perhaps with a token"),
    (b"PK\x03\x04", "this is a zip file, perhaps PyTorch's own format; convert it to safetensors"),
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    num_bytes: int


class Shard:
    """One open safetensors file.

    Args:
        path: The file. It stays open until ``close``; reads may come from any thread.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._lock = threading.Lock()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self.size = os.fstat(self._fd).st_size
            self.header = self._read_header()
            self.tensors = self._read_tensors()
        except CheckpointError:
            self.close()
            raise

    @property
    def header_bytes(self) -> int:
        """Bytes before the first tensor's: the header's length and the header."""
        return 8 + len(self.header)

    def read(self, name: str) -> Tensor:
        """Return a tensor as stored, in memory of its own."""
        info = self.info(name)
        raw = torch.empty(info.num_bytes, dtype=torch.uint8)
        if info.num_bytes:
            self._fill(raw.numpy().data, info.start, repr(name))
        with self._lock:
            self.bytes_read += info.num_bytes
        return raw.view(info.dtype).view(info.shape)

    def info(self, name: str) -> TensorInfo:
        """Return where a tensor lies."""
        try:
            return self.tensors[name]
        except KeyError:
            raise self._error(f"the index promises {name!r}, but the file lacks it") from None

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fill(self, buffer: memoryview, start: int, what: str) -> None:
        """Read until ``buffer`` is full: one call gives at most 2 GiB."""
        if self._fd < 0:
            raise self._error(f"{what} cannot be read: the checkpoint was closed")
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], start + done)
            except OSError as error:
                raise self._error(f"{what} cannot be read: {error.strerror}") from error
            if count == 0:
                raise self._error(f"{what} ends early: the file was cut short after it was opened")
            done += count

    def _read_header(self) -> bytes:
        length = int.from_bytes(self._bytes(0, min(self.size, 8)), "little")
        if self.size < 8 or 8 + length > self.size or length > MAX_HEADER_BYTES:
            cause = _likely_cause(self._bytes(0, min(self.size, 64)))
            raise self._error(f"{_header_fault(self.size, length)}: {cause}")
        return self._bytes(8, length)

    def _bytes(self, start: int, count: int) -> bytes:
        buffer = bytearray(count)
        self._fill(memoryview(buffer), start, "header")
        return bytes(buffer)

    def _read_tensors(self) -> dict[str, TensorInfo]:
        try:
            entries = json.loads(self.header, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self._error(f"header is not JSON: {error}") from error
        if not isinstance(entries, dict):
            raise self._error(f"header is a {type(entries).__name__}, not an object")
        entries.pop("__metadata__", None)
        tensors = {name: self._info(name, entry) for name, entry in entries.items()}
        self._check_covered(tensors)
        return tensors

    def _info(self, name: str, entry: Any) -> TensorInfo:
        match entry:
            case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
                pass
            case _:
                raise self._error(
                    f"header entry of {name!r} needs dtype, shape and data_offsets, got {entry!r}"
                )
        if code not in DTYPES:
            raise self._error(f"{name!r} has dtype {code!r}, known are {', '.join(DTYPES)}")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise self._error(f"{name!r} has shape {shape}, which is none")
        num_bytes = prod(shape) * DTYPES[code].itemsize
        if end - begin != num_bytes:
            raise self._error(
                f"{name!r}, {code} of shape {shape}, takes {num_bytes} bytes, "
                f"but data_offsets [{begin}, {end}] hold {end - begin}"
            )
        return TensorInfo(DTYPES[code], tuple(shape), self.header_bytes + begin, num_bytes)

    def _check_covered(self, tensors: dict[str, TensorInfo]) -> None:
        """Refuse gaps, overlaps and anything before, between or after the tensors."""
        at = self.header_bytes
        for name, info in sorted(
            tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)
        ):
            if info.start != at:
                raise self._error(
                    f"file not fully covered: {name!r} begins at byte {info.start}, not at {at}"
                )
            at += info.num_bytes
        if at != self.size:
            cause = "it was cut short" if at > self.size else "it has bytes after the last tensor"
            raise self._error(f"file not fully covered: its tensors end at byte {at}; {cause}")

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path} ({self.size} bytes): {text}")


def _header_fault(size: int, length: int) -> str:
    if size < 8:
        return "too short for a safetensors header"
    if length > MAX_HEADER_BYTES:
        return f"header too large ({length} bytes)"
    return f"header of {length} bytes does not fit into the file"


def _likely_cause(head: bytes) -> str:
    for prefix, cause in _NOT_SAFETENSORS:
        if head.lstrip().startswith(prefix):
            return cause
    return f"it was cut short, or is no safetensors file (it begins with {head[:16]!r})"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name!r} stands there twice")
        entries[name] = value
    return entries
