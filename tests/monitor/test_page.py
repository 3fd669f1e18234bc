from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import httpx
import pytest

from tests.monitor.planned import MODEL, Cluster, client, server
from torch_eaas.monitor.page import render_page
from torch_eaas.monitor.views import members_json, ready_json

EVIL = "<script>alert('x')</script>&\""


class Cells(HTMLParser):
    """Collects the rows of all tables, and every address that the page names."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str | None] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def page_of(cluster: Cluster) -> str:
    members = cluster.members
    return render_page(members_json(members, cluster.now), ready_json(members))


def parsed(html: str) -> Cells:
    cells = Cells()
    cells.feed(html)
    assert cells.open == []
    return cells


def test_the_page_shows_servers_clients_and_events() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.join(server("s2", 2, {1: (0,)}))
    cluster.join(client("c1", 3, counters={"dispatches": 7}))
    cluster.pass_time(1.5)
    cluster.beat(1, state="draining", room=4, counters={"requests": 12})
    rows = parsed(page_of(cluster)).rows
    assert ["s1", "draining", "6", "4", "0.0 s", "1.5 s", "12", "0.0", "unix:@s1"] in rows
    assert ["s2", "serving", "1", "0", "1.5 s", "1.5 s", "-", "0.0", "unix:@s2"] in rows
    assert ["c1", "1.5 s", "7", "0.0"] in rows
    assert ["1.5 s", "join", "client c1 joins"] in rows


def test_the_page_says_which_experts_are_missing() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1, {2: (1,)}))
    html = page_of(cluster)
    assert "not ready: experts without a live holder: 5" in html
    assert "Missing experts: layer 1: 0-2; layer 2: 0, 2" in html
    assert "<title>torch_eaas: not ready</title>" in html


def test_the_page_of_a_complete_cluster_says_ready() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    html = page_of(cluster)
    assert '<strong class="good">ready</strong>' in html
    assert "Missing" not in html
    assert "term 1, placement version 1" in html


def test_a_server_whose_lease_expired_is_shown_as_suspect() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.pass_time(6)
    row = ["s1", "suspect", "6", "0", "6.0 s", "6.0 s", "-", "0.0", "unix:@s1"]
    assert row in parsed(page_of(cluster)).rows


def test_a_server_that_lives_and_does_nothing_is_shown_as_stuck() -> None:
    cluster = Cluster()
    cluster.join(server("s1", 1))
    cluster.pass_time(7, beating=(1,))
    row = ["s1", "stuck", "6", "0", "0.0 s", "7.0 s", "-", "0.0", "unix:@s1"]
    assert row in parsed(page_of(cluster)).rows


def test_the_page_of_an_empty_cluster_says_so() -> None:
    html = page_of(Cluster())
    assert "not ready: no server has announced a model" in html
    assert "No server has joined." in html


@pytest.mark.parametrize("field", ["name", "address", "fingerprint"])
def test_what_members_say_is_text_and_never_markup(field: str) -> None:
    said = {
        "name": server(EVIL, 1, address="unix:@a"),
        "address": server("s1", 1, address=EVIL),
        "fingerprint": server("s1", 1, model=replace(MODEL, fingerprint=EVIL)),
    }
    cluster = Cluster()
    cluster.join(said[field])
    html = page_of(cluster)
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&amp;&quot;" in html
    parsed(html)


def test_the_page_loads_nothing_from_elsewhere(calm: httpx.Client) -> None:
    answer = calm.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert parsed(answer.text).links == []
    assert not re.search(r"https?://|@import|url\(", answer.text)
    assert answer.text.isascii()
