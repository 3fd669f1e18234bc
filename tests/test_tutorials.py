"""The tutorials run, and the README's example is tutorial 1's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_is_short(path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert len(path.read_text().splitlines()) < 150


def test_the_readmes_example_is_tutorial_ones() -> None:
    tutorial = (ROOT / "tutorials" / "01_remote_moe.py").read_text()
    example = tutorial.split("# %% README\n")[1].split("# %%")[0].strip()
    readme = (ROOT / "README.md").read_text()
    assert f"```python\n{example}\n```" in readme


def test_the_readmes_file_tree_names_files_that_exist() -> None:
    tree = (ROOT / "README.md").read_text().split("<!-- tree -->")[1].split("```")[1]
    folder: list[str] = []
    for line in tree.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folder = [*folder[:depth], name]
        assert (ROOT / "/".join(part.rstrip("/") for part in folder)).exists(), line
