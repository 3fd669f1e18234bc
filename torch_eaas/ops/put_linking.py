"""The put kernel is linked with NVSHMEM's bitcode, and loaded before anything launches it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import TritonError

from torch_eaas.errors import ConfigError
from torch_eaas.ops.launching import on_device
from torch_eaas.ops.put_slots import options_of, put_kernel

_PRODUCER = re.compile(rb"clang version (\d+\.\d+\.\d+)")


def load_put_kernel(bitcode: str, device: torch.device | str) -> int:
    """Link the kernel with NVSHMEM's bitcode, load it, and return its module's handle (CUmodule).

    NVSHMEM must be told of the module before it runs for the first time: what the device library
    knows of its job lies in the module. It takes 10 to 30 s where Triton's cache is cold.

    Args:
        bitcode: NVSHMEM's device library.
        device: The GPU.

    Raises:
        ConfigError: The bitcode cannot be read or does not define what is called.
    """
    table, entries = (torch.zeros(1, dtype=d, device=device) for d in (torch.int64, torch.int32))
    with on_device(table):
        kernel = _compiled(bitcode, table, table, entries, entries, table)
    # reading it loads the module
    assert kernel.run is not None
    module: int = kernel.module
    return module


def explain_link_failure(error: Exception, bitcode: str) -> ConfigError:
    """Return what is wrong with a bitcode that Triton or ptxas refused."""
    file = Path(bitcode)
    made = _PRODUCER.search(file.read_bytes()) if file.is_file() else None
    producer = f"made by clang {made[1].decode()}" if made else "not there or no LLVM bitcode"
    if "Failed to parse library" in str(error):
        return ConfigError(
            f"Triton {triton.__version__} cannot read NVSHMEM's bitcode {bitcode} ({producer}): "
            f"install a Triton whose LLVM is at least as new, or nvidia-nvshmem-cu13==3.6.5"
        )
    last = [line for line in str(error).splitlines() if "fatal" in line or "error" in line.lower()]
    return ConfigError(
        f"NVSHMEM's bitcode {bitcode} ({producer}) does not link with the put kernel: "
        f"{last[-1].strip() if last else error}; install nvidia-nvshmem-cu13==3.6.5"
    )


def _compiled(bitcode: str, *tensors: Tensor) -> Any:
    """Compile the kernel as every launch does, without running it."""
    try:
        return put_kernel.warmup(*tensors, 1, 1, grid=(1,), **options_of(bitcode))
    except (ValueError, OSError, TritonError) as error:
        raise explain_link_failure(error, bitcode) from error
