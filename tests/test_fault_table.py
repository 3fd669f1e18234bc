"""The page of faults names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    found: set[str] = set()
    tests = ROOT / "tests"
    for path in (*tests.rglob("test_*.py"), *tests.rglob("*_contract.py")):
        found |= set(re.findall(r"def (test_\w+)\(", path.read_text()))
    assert len(named) > 30
    assert named <= found, sorted(named - found)
