"""Compile Triton kernels for GPUs that are not there, and read what became of them.

A test module lists launches, calls that end in ``kernel[grid](...)`` on CPU tensors::

    LAUNCHES = {"swiglu bf16": lambda: launch(torch.empty(4, 256, dtype=torch.bfloat16))}

``compiled("tests.ops.test_this")`` runs them all in one process without the interpreter, where a
launch compiles for each capability and runs nothing, so that a kernel is compiled with just the
types, constants and alignments that its launch function gives it. That process takes seconds to
start, so it does so once, for all such modules that pytest has collected.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

CAPABILITIES = (90, 100)
"""Hopper (H100, H200) and Blackwell (B200)."""


@dataclass(frozen=True)
class Compiled:
    """One kernel as it was compiled for one launch and one capability.

    Args:
        launch: The launch's name in the module's table.
        kernel: The kernel's name.
        capability: 90 for sm_90 and so on.
        ptx: PTX, as text.
        cubin: The binary, base64.
        registers: Registers per thread.
        local_bytes: Stack and local memory per thread: more than none is a spill.
        shared_bytes: Shared memory per block.
    """

    launch: str
    kernel: str
    capability: int
    ptx: str
    cubin: str
    registers: int
    local_bytes: int
    shared_bytes: int

    def count(self, pattern: str) -> int:
        """Return how often a regular expression stands in the PTX."""
        return len(re.findall(pattern, self.ptx))


@cache
def compiled(module: str) -> list[Compiled]:
    """Compile every launch of a module's ``LAUNCHES``, once per test session."""
    ours = [name for name in sys.modules if name.startswith("tests.")]
    done, text = _compiled(tuple(n for n in ours if hasattr(sys.modules[n], "LAUNCHES")))
    assert done.returncode == 0, done.stderr
    return [Compiled(**fields) for fields in json.loads(text)[module]]


@cache
def _compiled(modules: tuple[str, ...]) -> tuple[subprocess.CompletedProcess[str], str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory() as folder:
        env["TRITON_CACHE_DIR"] = folder
        out = Path(folder) / "compiled.json"
        done = subprocess.run(
            [sys.executable, "-m", "tests.ops.compiling", str(out), *modules],
            env=env,
            capture_output=True,
            text=True,
            timeout=500,
        )
        return done, out.read_text() if out.exists() else ""


def find(module: str, launch: str, kernel: str, capability: int) -> Compiled:
    """Return the one kernel of that name that a launch compiled."""
    wanted = (launch, kernel, capability)
    [found] = [c for c in compiled(module) if (c.launch, c.kernel, c.capability) == wanted]
    return found


# -- in the process without the interpreter ----------------------------------------------------


class _AbsentGpu:
    """What Triton asks its driver before it compiles; the device's number is the capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def _usage(cubin: bytes, folder: Path) -> dict[str, int]:
    import triton

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run(
        [tool, "-res-usage", file], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}
    return {
        "registers": numbers["REG"],
        "local_bytes": numbers["STACK"] + numbers["LOCAL"],
    }


def _compile_all(modules: Sequence[str], folder: Path) -> dict[str, list[Compiled]]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compile_only = JITFunction.run
    found: dict[str, list[Compiled]] = {module: [] for module in modules}
    module = launch = ""
    gpu = _AbsentGpu(0)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
        fresh = Compiled(
            launch=launch,
            kernel=self.fn.__name__,
            capability=gpu.capability,
            ptx=kernel.asm["ptx"],
            cubin=base64.b64encode(kernel.asm["cubin"]).decode(),
            shared_bytes=kernel.metadata.shared,
            **_usage(kernel.asm["cubin"], folder),
        )
        if fresh not in found[module]:
            found[module].append(fresh)

    JITFunction.run = run
    for module, capability in product(modules, CAPABILITIES):
        gpu = _AbsentGpu(capability)
        driver.set_active(gpu)
        launches = importlib.import_module(module).LAUNCHES
        for launch in launches:
            launches[launch]()
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1])
    all_kernels = _compile_all(sys.argv[2:], target.parent)
    target.write_text(
        json.dumps({name: [*map(asdict, kernels)] for name, kernels in all_kernels.items()})
    )
