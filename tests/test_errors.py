"""The family of exceptions: its tree as drawn, and what each message carries."""

from __future__ import annotations

import inspect
import re

import pytest

from torch_eaas import errors
from torch_eaas.errors import ExpertUnavailable

FAMILY = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, Exception)
}


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Return each name of the docstring's tree with its parent and what stands in brackets."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    pattern = r"([ |`-]*)([A-Z]\w+)(?: \((\w+)\))?"
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(rf"    {pattern}", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        path = [*path[:depth], match[2]]
        tree[match[2]] = (path[depth - 1] if depth else None, match[3])
    return tree


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    tree = drawn()
    assert set(tree) == set(FAMILY)
    for name, (parent, builtin) in tree.items():
        bases = [base.__name__ for base in FAMILY[name].__bases__]
        assert bases == [b for b in (parent or "Exception", builtin) if b]


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_every_exception_says_what_it_is_for(name: str) -> None:
    assert inspect.getdoc(FAMILY[name])


def test_a_callers_mistakes_are_value_errors_and_the_wires_are_not() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.TransportError, RuntimeError)
    assert issubclass(errors.PeerTimeout, TimeoutError)
    wire = [e for e in FAMILY.values() if issubclass(e, errors.TransportError)]
    assert not any(issubclass(e, errors.ConfigError) for e in wire)


@pytest.mark.parametrize(
    ("tried", "reason", "message"),
    [
        ((), "", "layer 3, expert 7 is unavailable (no server holds it)"),
        (("a",), "", "layer 3, expert 7 is unavailable (tried a)"),
        (
            ("a", "b"),
            "b: draining",
            "layer 3, expert 7 is unavailable (tried a, b): b: draining",
        ),
        (
            (),
            "no pair is open to a",
            "layer 3, expert 7 is unavailable (no server holds it): no pair is open to a",
        ),
    ],
)
def test_an_unavailable_expert_names_layer_expert_whom_and_why(
    tried: tuple[str, ...], reason: str, message: str
) -> None:
    error = ExpertUnavailable(3, 7, tried, reason)
    assert str(error) == message
    assert (error.layer, error.expert, error.tried) == (3, 7, tried)
