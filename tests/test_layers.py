"""Imports point down the layout, heavy imports stay where they belong, and no file breaks form."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import torch_eaas

PACKAGE = Path(torch_eaas.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

ROWS = (
    {"errors"},
    {"access"},
    {"config", "capture"},
    # placement is pure and without torch; experts says in its terms what it holds
    {"protocol", "placement"},
    {"comm", "ops", "device"},
    {"device.puts", "experts", "routers", "row_views", "spans"},
    {"monitor"},
    {"client", "server"},
    {"dbo"},
    {"remote_moe"},
    {"models"},
    {"testing", "cli", "sim"},
    {"top"},
)
"""A file may import from its own unit and from lower rows; units of one row are strangers."""

CLIENT = {
    "client",
    "client_calls",
    "client_engine",
    "client_failover",
    "client_inputs",
    "client_pairs",
    "client_pieces",
    "client_staging",
    "client_tickets",
    "client_turns",
}
CLIENT |= {"connections", "control_tasks", "directory", "left_windows", "open_pair", "pair_keeper"}
CLIENT |= {"routing"}
CLIENT |= {
    "device.captured_step",
    "device.client",
    "device.client_book",
    "device.client_calls",
    "device.client_eager",
    "device.client_failover",
    "device.client_pairs",
    "device.client_staging",
    "device.client_tables",
    "device.client_words",
}
SERVER = {"server", "server_batch", "server_control", "server_drain", "server_loading"}
SERVER |= {"server_base", "server_pairs", "server_path"}
SERVER |= {"device.server", "device.server_counters", "device.server_iteration"}
SERVER |= {"device.server_pairs", "device.server_path"}
DEVICE = {"device", "device.captured", "device.stream"}
EXPERTS = {"experts", "device.expert_slab", "device.slab_memory"}
REMOTE_MOE = {"remote_moe", "remote_ops"}
DBO = {"dbo", "batch_splitting", "thread_state", "turns"}
TOP = {"", "__main__"}

UNITS = (
    ("client", CLIENT),
    ("server", SERVER),
    ("device", DEVICE),
    ("experts", EXPERTS),
    ("dbo", DBO),
    ("remote_moe", REMOTE_MOE),
    ("top", TOP),
)

WITHOUT_TORCH = [
    "errors",
    "access",
    "config",
    "protocol",
    "placement",
    "comm",
    "monitor",
    "cli.main",
]
"""Files and folders that never import torch."""


def module_of(file: Path) -> str:
    """Return a file's module within the package; "" is the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """Return the folder or the group of files that a module belongs to."""
    head, _, rest = module.partition(".")
    # the device path has parts of several units
    name = module if head == "device" and rest else head
    for unit, members in UNITS:
        if name in members:
            return unit
    return name


def row_of(module: str) -> int:
    unit = unit_of(module)
    [row] = [i for i, units in enumerate(ROWS) if unit in units]
    return row


def may_import(here: str, there: str) -> bool:
    return unit_of(here) == unit_of(there) or row_of(there) < row_of(here)


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and module of each import, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                # "from torch_eaas import errors" imports a module too
                name = f"{node.module}.{alias.name}"
                is_module = (PACKAGE.parent / Path(*name.split("."))).with_suffix(".py").exists()
                yield node.lineno, name if is_module else node.module


FILE = pytest.mark.parametrize("file", FILES, ids=lambda file: module_of(file) or "torch_eaas")


def test_every_file_has_a_row_in_the_layout() -> None:
    for file in FILES:
        assert sum(unit_of(module_of(file)) in units for units in ROWS) == 1, (
            f"{file.name} is in no row: add it to ROWS, where the layout puts it"
        )


@FILE
def test_a_file_imports_from_its_own_folder_and_from_lower_rows_only(file: Path) -> None:
    here = module_of(file)
    for line, name in imports_of(file):
        if name.split(".")[0] != "torch_eaas" or name == "torch_eaas":
            continue
        there = name.removeprefix("torch_eaas.")
        assert may_import(here, there), f"{file}:{line}: {here} may not import {there}"


@pytest.mark.parametrize(
    ("here", "there", "may"),
    [
        ("experts", "placement", True),
        ("placement", "experts", False),
        ("comm.window", "ops.reference", False),
        ("ops.reference", "comm.window", False),
        ("comm.frames", "comm.window", True),
        ("client_engine", "monitor.agent", True),
        ("monitor.agent", "client_engine", False),
        ("client_pairs", "server_pairs", False),
        ("server_pairs", "client_pairs", False),
        ("protocol.layout", "config", True),
        ("config", "protocol.layout", False),
        ("__main__", "cli.main", True),
        ("cli.main", "__main__", False),
    ],
)
def test_the_rule_is_the_layouts(here: str, there: str, may: bool) -> None:
    assert may_import(here, there) == may


def test_only_the_command_line_asks_the_package_itself_for_names() -> None:
    users = {
        unit_of(module_of(file))
        for file in FILES
        for _, name in imports_of(file)
        if name == "torch_eaas"
    }
    assert users <= {"cli", "top"}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_needs_no_torch_never_imports_it(name: str) -> None:
    modules = [
        f"torch_eaas.{module}"
        for module in map(module_of, FILES)
        if module == name or module.startswith(f"{name}.")
    ]
    assert modules
    script = "import importlib, sys\nfor m in sys.argv[1:]: importlib.import_module(m)\n"
    script += "assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", script, *modules],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_every_file_is_ascii() -> None:
    for file in FILES:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            assert line.isascii(), f"{file}:{number}"


def test_every_module_says_what_it_is() -> None:
    for file in FILES:
        assert ast.get_docstring(tree_of(file)), f"{file} has no docstring"


def test_no_function_declares_a_global() -> None:
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            assert not isinstance(node, ast.Global), f"{file}:{node.lineno}"
