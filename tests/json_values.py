"""JSON values for fuzzing: any at all, and those that are almost what was wanted."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

TEXT = st.text(max_size=20) | st.sampled_from(["\ud800", "\0", "<b>", '"', "9" * 5000, "server"])
NUMBER = st.integers(-(1 << 70), 1 << 70) | st.floats() | st.just(10**4299)
VALUE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def almost(draw: st.DrawFn, right: Any) -> Any:
    """Draw a value with up to two parts of ``right`` changed, and perhaps one added."""
    value = right
    for _ in range(draw(st.integers(0, 2))):
        value = changed(value, draw(st.sampled_from(places(value))), draw(VALUE))
    if isinstance(value, dict) and draw(st.booleans()):
        value = {**value, draw(TEXT): draw(VALUE)}
    return value


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each part of a JSON value."""
    found = [at]
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            found += places(part, (*at, key))
    return found


def changed(value: Any, at: tuple[Any, ...], to: Any) -> Any:
    """Return a JSON value with another part at a path."""
    if not at:
        return to
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(value[at[0]], at[1:], to)
    return copy
