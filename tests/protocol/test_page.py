"""The specification's tables are the code's: docs/protocol.md cannot drift."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torch_eaas.comm.frames import MAX_FDS, MAX_FRAME_BYTES
from torch_eaas.protocol import layout
from torch_eaas.protocol.layout import REPLY_FIELDS, REQUEST_FIELDS, Field, Status
from torch_eaas.protocol.pairs import FIRST_BACKOFF_S, MAX_BACKOFF_S
from torch_eaas.protocol.words import REQUEST, RESPONSE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
TEXT = " ".join(PAGE.split())
"""The page without its line breaks."""

SIZES = {"Q": 8, "I": 4}


def table_of(head: str) -> list[list[str]]:
    """Return the rows of the one table whose head row is this, cell by cell."""
    lines = PAGE.splitlines()
    [at] = [i for i, line in enumerate(lines) if line == head]
    rows = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line[1:-1].split(" |")])
    return rows


def section(title: str) -> str:
    """Return a section's text, up to the next heading."""
    return re.split(r"^#+ ", PAGE.split(f"{title}\n", 1)[1], maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize(
    ("title", "table"),
    [("### Request header", REQUEST_FIELDS), ("### Reply header", REPLY_FIELDS)],
)
def test_the_pages_headers_are_the_codes(title: str, table: tuple[Field, ...]) -> None:
    rows = [
        [cell.strip() for cell in line[1:-1].split(" |")]
        for line in section(title).splitlines()
        if re.match(r"\| \d", line)
    ]
    at, expected = 0, []
    for field in table:
        expected.append([str(at), str(SIZES[field.code]), field.name, field.meaning])
        at += SIZES[field.code]
    assert rows == expected


def test_the_pages_status_codes_are_the_codes() -> None:
    rows = [row[:3] for row in table_of("| code | status | ask again | when |")]
    expected = [
        [str(int(s)), s.name, "" if s is Status.OK else "yes" if s.may_retry else "no"]
        for s in Status
    ]
    assert rows == expected


def test_the_pages_states_are_the_codes() -> None:
    states = {row[2].split(":")[0]: row[0] for row in table_of("| state | where | meaning |")}
    assert states["REQUEST"] == str(REQUEST)
    assert states["RESPONSE"] == str(RESPONSE)


def test_the_pages_limits_are_the_codes() -> None:
    assert [row[1] for row in table_of("| limit | value |")] == [
        str(layout.HEADER_BYTES),
        str(layout.WORD_BYTES),
        str(layout.MAX_SLOTS),
        str(layout.MAX_TOKENS),
        str(layout.MAX_WINDOW_BYTES),
        "4096",
    ]
    assert PAGE.startswith(f"# The buffer protocol, version {layout.PROTOCOL_VERSION}\n")
    assert f"a multiple of {layout.ALIGN} bytes" in TEXT
    assert f"a JSON object of at most {MAX_FRAME_BYTES >> 20} MiB; over a unix socket" in TEXT
    assert f"over a unix socket at most {MAX_FDS} file descriptors" in TEXT
    assert f"waits {FIRST_BACKOFF_S * 1000:g} ms, then twice as long" in TEXT
    assert f"up to {MAX_BACKOFF_S:g} s" in TEXT


def test_the_page_names_every_field_of_a_spec() -> None:
    [sentence] = re.findall(r"The spec is fixed here and is not sent again: ([^.]+)\.", TEXT)
    named = re.findall(r"`(\w+)`", sentence)
    spec = layout.PairSpec(hidden_size=1, top_k=1, slots=1, max_tokens=1)
    assert named == list(spec.to_json())


def test_the_files_that_the_page_names_exist() -> None:
    names = re.findall(r"`(tests/[\w/.]+)`", PAGE)
    assert len(names) >= 5
    for name in names:
        assert (ROOT / name).exists(), name


def test_every_link_to_a_section_leads_somewhere() -> None:
    sections = {int(n) for n in re.findall(r"^## (\d+)\. ", PAGE, flags=re.M)}
    assert sections == set(range(1, len(sections) + 1))
    assert {int(n) for n in re.findall(r"section (\d+)", PAGE)} <= sections


def test_one_r1_token_takes_what_the_page_says() -> None:
    spec = layout.PairSpec(hidden_size=7168, top_k=8, slots=4, max_tokens=128, wire_dtype="bf16")
    used = spec.hidden_offset + 7168 * 2
    assert f"{used / 1024:.0f} KiB of its slot's {spec.request_slot_bytes / 2**20:.1f} MiB" in TEXT
