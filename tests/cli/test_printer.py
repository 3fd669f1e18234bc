from __future__ import annotations

import io

import pytest

from torch_eaas.cli.printer import Printer


@pytest.mark.parametrize(
    ("pieces", "plain", "prefixed"),
    [
        (["a", "b\nc"], "ab\nc\n", "> ab\n> c\n"),
        (["a\n"], "a\n", "> a\n"),
        (["a\n\n", "b"], "a\n\nb\n", "> a\n> \n> b\n"),
        (["", ""], "", ""),
        ([], "", ""),
    ],
    ids=str,
)
def test_pieces_become_lines(pieces: list[str], plain: str, prefixed: str) -> None:
    for prefix, expected in ("", plain), ("> ", prefixed):
        file = io.StringIO()
        printer = Printer(prefix, file)
        for piece in pieces:
            printer.write(piece)
        printer.end()
        assert file.getvalue() == expected


def test_text_is_printed_at_once_but_lines_with_a_prefix_only_when_whole() -> None:
    plain, prefixed = io.StringIO(), io.StringIO()
    Printer("", plain).write("a")
    Printer("> ", prefixed).write("a")
    assert (plain.getvalue(), prefixed.getvalue()) == ("a", "")


def test_a_line_of_its_own_ends_the_one_that_is_open() -> None:
    file = io.StringIO()
    printer = Printer(file=file)
    printer.write("a")
    printer.line("-- b --")
    printer.line("-- c --")
    printer.write("d\n")
    printer.end()
    assert file.getvalue() == "a\n-- b --\n-- c --\nd\n"
