"""A table of a TOML file, read key by key; what is wrong is named with file, table and key."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch_eaas.errors import ConfigError

Value = TypeVar("Value")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Table:
    """Reads keys, each with its check, and at last refuses those that nobody read.

    Args:
        file: Named in messages.
        place: The table in them, like ``[monitor]``; empty for the top of the file.
        values: What it holds.
    """

    def __init__(self, file: Path, place: str, values: Mapping[str, object]) -> None:
        self.place = place
        self._file = file
        self._values = values
        self._known: list[str] = []

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string that is not empty; without a default the key is required."""
        value = self._take(key, default)
        if not isinstance(value, str) or not value:
            raise self.error(key, "a string that is not empty", value)
        return value

    def name(self, default: str) -> str:
        """Return ``name``, which heads lines and goes into commands."""
        value = self.text("name", default)
        if not _NAME.fullmatch(value):
            raise self.error("name", "of letters, digits, dots, dashes and underscores", value)
        return value

    def one_of(self, key: str, choices: tuple[Value, ...], default: Value) -> Value:
        """Return one of some values."""
        value = self._take(key, default)
        for choice in choices:
            if value == choice:
                return choice
        raise self.error(key, f"one of {', '.join(map(repr, choices))}", value)

    def integer(self, key: str, default: int, least: int, most: int | None = None) -> int:
        """Return an integer within bounds."""
        value = self._take(key, default)
        highest = sys.maxsize if most is None else most
        # a boolean is an int in Python and none in TOML
        if type(value) is int and least <= value <= highest:
            return value
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise self.error(key, f"an integer {limit}", value)

    def seconds(self, key: str, default: float) -> float:
        """Return a number above zero."""
        value = self._take(key, default)
        # infinity and NaN are numbers in TOML, and no durations
        if isinstance(value, int | float) and value is not True and 0 < value < 1e9:
            return float(value)
        raise self.error(key, "a number of seconds above 0", value)

    def flag(self, key: str) -> bool:
        """Return true or false; false if the key is missing."""
        value = self._take(key, False)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def file(self, key: str) -> Path | None:
        """Return a file beside this one, or None if the key is missing."""
        if key not in self._values:
            self._known.append(key)
            return None
        path = self._file.parent / self.text(key)
        if not path.is_file():
            raise self.error(key, "a file", str(path))
        return path

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a required list of strings, at least one."""
        value = self._take(key, None)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise self.error(key, "a list of strings, at least one", value)
        return tuple(value)

    def parsed(self, key: str, parse: Callable[[str], Value]) -> Value | None:
        """Return what an option's function makes of a string; None if the key is missing."""
        if key not in self._values:
            self._known.append(key)
            return None
        value = self.text(key)
        try:
            return parse(value)
        except ArgumentTypeError as error:
            raise ConfigError(f"{self._where(key)} {error}") from error

    def table(self, key: str) -> Table:
        """Return a table within this one, empty if it is missing."""
        value = self._take(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"a table, written [{key}]", value)
        return Table(self._file, f"[{key}]", value)

    def tables(self, key: str) -> list[Table]:
        """Return the tables of a list of them, none if it is missing."""
        value: Any = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self.error(key, f"a list of tables, each written [[{key}]]", value)
        return [Table(self._file, f"[[{key}]] {n}", each) for n, each in enumerate(value, 1)]

    def finish(self) -> None:
        """Refuse keys that nobody read."""
        for key in self._values:
            if key not in self._known:
                raise ConfigError(
                    f"{self._where(key)} is not known; known here: {', '.join(self._known)}"
                )

    def error(self, key: str, expected: str, value: object) -> ConfigError:
        """Return the error for a key whose value is not what was expected."""
        got = "it is missing" if value is None else f"got {value!r}"
        return ConfigError(f"{self._where(key)} must be {expected}, {got}")

    def _take(self, key: str, default: object) -> object:
        self._known.append(key)
        return self._values.get(key, default)

    def _where(self, key: str) -> str:
        return f"{self._file}: {self.place} {key}" if self.place else f"{self._file}: {key}"
