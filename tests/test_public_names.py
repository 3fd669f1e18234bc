"""The list of public names, what it costs to import the package, and the version."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torch_eaas

ROOT = Path(torch_eaas.__file__).parent


def test_every_public_name_loads_and_is_listed_once_and_sorted() -> None:
    names = torch_eaas.__all__
    assert names == ["__version__", *sorted(set(names) - {"__version__"})]
    for name in names:
        assert getattr(torch_eaas, name) is not None


def test_the_stub_lists_the_same_names_as_the_package() -> None:
    tree = ast.parse((ROOT / "__init__.pyi").read_text())
    stubbed = {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert stubbed == set(torch_eaas.__all__) - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        _ = torch_eaas.NoSuchThing  # type: ignore[attr-defined]  # that is the test


def _seconds(code: str) -> float:
    best = 1e9
    for _ in range(3):
        start = time.monotonic()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        best = min(best, time.monotonic() - start)
    return best


def test_importing_the_package_is_faster_than_twice_importing_torch_and_brings_no_torch() -> None:
    assert _seconds("import torch_eaas") < 2 * _seconds("import torch")
    code = "import sys, torch_eaas; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_all_public_names_load_without_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch_eaas\n"
        "for name in torch_eaas.__all__: getattr(torch_eaas, name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_changelog_names_the_version() -> None:
    changelog = (ROOT.parent / "CHANGELOG.md").read_text()
    assert f"## [{torch_eaas.__version__}]" in changelog
