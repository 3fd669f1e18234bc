"""A safetensors checkpoint directory, of which only what is asked for is read.

``config.json`` and the index are read at once, a shard's header when its first tensor is wanted,
tensors one by one. FP8 weights come with one scale per block, as DeepSeek-V3 publishes them: the
block's size stands in ``config.json`` and is never guessed from the shapes.

Shapes: a weight is ``(N, K)``, its scales ``(ceil(N / block rows), ceil(K / block columns))``.
"""

import hashlib
import json
import threading
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from torch_eaas.errors import CheckpointError
from torch_eaas.models.shards import Shard, TensorInfo
from torch_eaas.ops.quantize import dequantize_blocks

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

SCALE_SUFFIX = "_scale_inv"
"""What a weight's name and its scales' name differ by."""


class Checkpoint:
    """A directory with ``config.json`` and safetensors files.

    It holds the files open that it has read from, until ``close`` or the end of a ``with``.
    Reads may come from any thread.

    Args:
        path: The directory. With ``model.safetensors.index.json`` the tensors may lie in many
            files, without it all lie in ``model.safetensors``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: is no directory; a checkpoint is one")
        self._shards: dict[str, Shard] = {}
        self._lock = threading.Lock()
        config = self._file(CONFIG)
        self.config = _parse_object(self.path / CONFIG, config)
        index = self._read_index()
        self.fingerprint = hashlib.sha256(config + index).hexdigest()[:16]

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._files)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far, headers not counted."""
        return sum(shard.bytes_read for shard in list(self._shards.values()))

    @property
    def header_bytes_read(self) -> int:
        """Bytes of the headers read so far."""
        return sum(shard.header_bytes for shard in list(self._shards.values()))

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a weight that share one scale.

        Raises:
            CheckpointError: If ``config.json`` names no FP8 format with block scales.
        """
        match self.config.get("quantization_config"):
            case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]}:
                if rows > 0 and columns > 0:
                    return rows, columns
            case _:
                pass
        raise CheckpointError(
            f"{self.path / CONFIG}: quantization_config must have quant_method 'fp8' and a "
            f"weight_block_size of two sizes, got {self.config.get('quantization_config')!r}"
        )

    def where(self, name: str) -> str:
        """Return the tensor's file and name, for messages."""
        return f"{self._files.get(name, self.path.name)}: {name}"

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's dtype, shape and place; reads its file's header at most."""
        return self._shard(name).info(name)

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored, in memory of its own."""
        return self._shard(name).read(name)

    def read_weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor in ``dtype``; an FP8 weight is multiplied by its scales first."""
        if self.info(name).dtype.itemsize > 1:
            return self.read(name).to(dtype)
        weight_NK, scale_inv = self.read_blocks(name)
        return dequantize_blocks(weight_NK, scale_inv, self.block).to(dtype)

    def read_blocks(self, name: str) -> tuple[Tensor, Tensor]:
        """Return an FP8 weight ``(N, K)`` as stored, and its scales, fp32, one per block."""
        info = self.info(name)
        if info.dtype != torch.float8_e4m3fn or len(info.shape) != 2:
            raise CheckpointError(
                f"{self._describe(name)}: is not an FP8 weight; expected float8_e4m3fn (N, K)"
            )
        scale = name + SCALE_SUFFIX
        if scale not in self._files:
            raise CheckpointError(f"{self._describe(name)}: has no scales; expected {scale}")
        expected = tuple(ceil(n / b) for n, b in zip(info.shape, self.block, strict=True))
        found = self.info(scale)
        if found.dtype != torch.float32 or found.shape != expected:
            raise CheckpointError(
                f"{self._describe(scale)}: expected float32 {expected}, "
                f"one scale per block {self.block} of {info.shape}"
            )
        return self.read(name), self.read(scale)

    def close(self) -> None:
        """Close all files; safe to call twice."""
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _shard(self, name: str) -> Shard:
        if name not in self._files:
            raise CheckpointError(f"{self.path}: holds no tensor {name!r}")
        file = self._files[name]
        with self._lock:
            if file not in self._shards:
                self._shards[file] = Shard(self.path / file)
            return self._shards[file]

    def _read_index(self) -> bytes:
        """Learn which file holds which tensor, and return what tells so."""
        if (self.path / INDEX).exists():
            index = self._file(INDEX)
            self._files = _weight_map(self.path / INDEX, index)
            return index
        shard = self._shards[SINGLE] = Shard(self.path / SINGLE)
        self._files = dict.fromkeys(shard.tensors, SINGLE)
        return shard.header

    def _file(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{self.path / name}: cannot be read: {error.strerror}"
            ) from error

    def _describe(self, name: str) -> str:
        info = self.info(name)
        return f"{self.where(name)} ({str(info.dtype).removeprefix('torch.')} {info.shape})"


def _parse_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} ({len(text)} bytes): is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object, got a {type(value).__name__}")
    return value


def _weight_map(path: Path, text: bytes) -> dict[str, str]:
    weight_map = _parse_object(path, text).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: needs a weight_map from tensors to files")
    for name, file in weight_map.items():
        # a file name, not a path: an index must not reach outside its directory
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: {name!r} must lie in a file beside it, got {file!r}")
    return weight_map
