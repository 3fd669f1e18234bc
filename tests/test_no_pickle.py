"""Nothing that a peer sends can become code: no pickle, and nothing that unpickles or evaluates."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_eaas

PACKAGE = Path(torch_eaas.__file__).parent

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# their pipes, queues and results are pickled
MODULES |= {"multiprocessing", "concurrent.futures", "torch.multiprocessing"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"torch.load", "torch.save", "np.load", "numpy.load", "yaml.load"}
# object collectives of torch.distributed, such as broadcast_object_list
PARTS = ("pickle", "object_list", "gather_object")


def faults_in(source: str) -> Iterator[str]:
    """Yield each line's number and what it does that could turn bytes into code."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if is_module(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name for name in full if is_module(name) or name in ATTRIBUTES]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [node.func.id] if node.func.id in CALLS else []
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            is_fault = name in ATTRIBUTES or name.split(".")[0] == "builtins" or is_part(node.attr)
            names = [name] if is_fault or is_module(name) else []
        elif isinstance(node, ast.keyword) and node.arg is not None and is_part(node.arg):
            names = [node.arg]
        for name in names:
            yield f"{getattr(node, 'lineno', 0)}: {name}"


def is_module(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in MODULES)


def is_part(name: str) -> bool:
    return any(part in name for part in PARTS)


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: file.stem)
def test_nothing_turns_bytes_into_code(file: Path) -> None:
    assert list(faults_in(file.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from marshal import loads",
        "import os, shelve",
        "def f():\n    from multiprocessing import Pipe",
        "import multiprocessing.connection",
        "from multiprocessing.connection import Client",
        "from concurrent import futures",
        "from concurrent.futures import ProcessPoolExecutor",
        "import torch.multiprocessing as mp",
        "import torch\ntorch.multiprocessing.Queue()",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "from torch import load",
        "eval('1')",
        "exec('1')",
        "import builtins\nbuiltins.eval('1')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "make(allow_pickle=True)",
        "import torch.distributed as d\nd.broadcast_object_list([])",
    ],
)
def test_what_turns_bytes_into_code_is_found(source: str) -> None:
    assert list(faults_in(source))


@pytest.mark.parametrize("source", ["model.eval()", "import json", "re.compile('x')", "code.loads"])
def test_what_is_harmless_is_not_found(source: str) -> None:
    assert not list(faults_in(source))
