"""Text on stdout as it comes, alone or beside other processes."""

import sys
from typing import TextIO


class Printer:
    """Prints pieces of text at once; with a prefix, whole lines that begin with it.

    Args:
        prefix: For processes that share a terminal, which would cut each other's lines.
        file: Where to.
    """

    def __init__(self, prefix: str = "", file: TextIO | None = None) -> None:
        self._prefix = prefix
        self._file = file or sys.stdout
        self._line = ""
        self._at_start = True

    def write(self, text: str) -> None:
        """Print a piece of text."""
        if self._prefix:
            *lines, self._line = (self._line + text).split("\n")
            text = "".join(f"{self._prefix}{line}\n" for line in lines)
        if text:
            self._at_start = text.endswith("\n")
            print(text, end="", file=self._file, flush=True)

    def line(self, text: str) -> None:
        """Print a text on a line of its own."""
        self.end()
        self.write(f"{text}\n")

    def end(self) -> None:
        """End a line that has been begun."""
        if self._line or not self._at_start:
            self.write("\n")
