"""What NVIDIA's own cuda-bindings hand on to the driver, here to a library that notes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MIB = 1 << 20

PROGRAM = """
import os
from torch_eaas.comm.cuda_driver import CudaDriver
from torch_eaas.comm.cuda_ipc import CudaWindows

windows = CudaWindows(CudaDriver(2))
made = windows.create(5000)
adopted = windows.adopt(os.dup(made.fd), 3 << 20)
print(made.fd, made.memory.address, adopted.memory.address, flush=True)
made.close()
adopted.close()
"""


HAS_BINDINGS = find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


@pytest.mark.skipif(
    not HAS_BINDINGS or shutil.which("cc") is None, reason="needs cuda-bindings and a C compiler"
)
def test_the_drivers_calls_get_numbers_and_structures_as_cuda_defines_them(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    source = str(HERE / "libcuda_stub.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), source, "-ldl"], check=True)
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fd, *addresses = map(int, done.stdout.split())
    assert addresses == [0x700000000] * 2
    small, large = 2 * MIB, 4 * MIB
    # pinned memory of GPU 2 for descriptors, mapped to be read and written there
    assert done.stderr.splitlines() == [
        f"create {small}: 1 1 1 2",
        f"map {small} of 77",
        f"access {small}: 1 2 3",
        "push 0x99",
        # one that waits for no default stream
        "stream 1",
        f"set 700000000 0 {small} 0x55",
        "pop",
        f"export 77 as 1: {fd}",
        "release 77",
        # the descriptor is the number itself, in a pointer's place
        f"import {fd + 1} as 1",
        # native atomics, to GPU 3, where the stand-in says that it lies
        "reaches 3: 2 to 3",
        f"map {large} of 88",
        f"access {large}: 1 2 3",
        "release 88",
        f"unmap {small}",
        f"free {small}",
        f"unmap {large}",
        f"free {large}",
    ]
