"""docs/device_path.md names what exists, and its nodes are the launches, in their order."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_path_checks import in_one_process
from benchmarks.gpu_path_ends import QUICK
from torch_eaas.device.captured_step import CapturedStep

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "device_path.md").read_text()
STAGES = {"wait_free": "wait_words", "wait_replies": "wait_words"}
"""What two of the page's nodes are as ops."""


ALSO = {"exact", "wait_words"}
"""A mode, and an op that no function is named like."""


@cache
def names_of_classes() -> dict[str, set[str]]:
    """Return what each class of the package defines, and under "" every other name."""
    found: dict[str, set[str]] = {"": set()}
    for path in (ROOT / "torch_eaas").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(_defined_in(node))
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.args, *node.args.kwonlyargs]
                found[""] |= {node.name, *(argument.arg for argument in arguments)}
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[""].add(node.target.id)
    return found


def _defined_in(cls: ast.ClassDef) -> set[str]:
    names = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def test_every_class_table_and_option_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`([A-Za-z_][\w.]*)(?:\(\)|=\w+)?`", PAGE))
    classes = names_of_classes()
    missing = set()
    for name in named:
        head, _, attribute = name.rpartition(".")
        if name.startswith("torch_eaas."):
            module = __import__(head, fromlist=[attribute])
            assert hasattr(module, attribute), name
        elif attribute and head:
            if attribute not in classes.get(head, set()):
                missing.add(name)
        elif name not in classes and name not in classes[""] and name not in ALSO:
            missing.add(name)
    assert len(named) > 40
    assert not missing, missing


class Launches(TorchDispatchMode):
    """Notes the ops of ours that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.overloadpacket._qualified_op_name.partition("::")
        if namespace == "torch_eaas":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def nodes_of(section: str) -> list[str]:
    """Return the nodes that a section's table names, in order."""
    body = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", body, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def without_repeats(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


@pytest.fixture(scope="module")
def launched() -> tuple[list[str], list[str]]:
    """Return the launches of a client's step of one layer, and of a server's iteration."""
    with in_one_process(replace(QUICK, layers=1), torch.device("cpu")) as ends:
        given, experts = ends.batch(3, 1), ends.experts(0)
        step = CapturedStep(ends.client, lambda: experts(*given))
        with Launches() as client:
            step._captured.replay()
        with Launches() as server:
            ends.servers[0]._path._iteration.run()
    return client.names, server.names


def test_the_clients_nodes_are_the_pages(launched: tuple[list[str], list[str]]) -> None:
    nodes = nodes_of("The client's nodes")
    assert launched[0] == [STAGES.get(node, node) for node in nodes]


def test_the_servers_nodes_are_the_pages(launched: tuple[list[str], list[str]]) -> None:
    assert without_repeats(launched[1]) == nodes_of("The server's nodes")


def test_every_node_is_in_the_picture() -> None:
    picture = PAGE.split("```")[1]
    shown = set(re.findall(r"\w+", picture))
    nodes = nodes_of("The client's nodes") + nodes_of("The server's nodes")
    told = {"grouped_gemm": "GEMM", "swiglu": "SwiGLU", "read_clock": "us"}
    assert not [node for node in nodes if told.get(node, node) not in shown]
