"""The list of public ops, and what it costs to import those who need the twins only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from torch_eaas import ops

FOLDER = Path(ops.__file__).parent


def test_every_public_op_loads_is_listed_once_and_has_an_example() -> None:
    assert ops.__all__ == sorted(set(ops.__all__))
    for name in ops.__all__:
        op = getattr(ops, name)
        assert op.__name__ == name
        assert "Example:" in op.__doc__, name


def test_the_stub_lists_the_same_names_as_the_package() -> None:
    tree = ast.parse((FOLDER / "__init__.pyi").read_text())
    stubbed = {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert stubbed == set(ops.__all__)


def test_no_file_is_named_like_a_public_op() -> None:
    assert not {file.stem for file in FOLDER.glob("*.py")} & set(ops.__all__)


def test_an_unknown_op_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'torch_eaas.ops' has no .* 'no_such_op'"):
        _ = ops.no_such_op  # type: ignore[attr-defined]  # that is the test


def test_a_cpu_server_imports_no_triton() -> None:
    code = "import sys, torch_eaas.server, torch_eaas.experts; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
