"""The status page: one self-contained HTML document that refreshes itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
"""Header that goes with the page: it loads nothing from anywhere else."""

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #6e7781; --good: #1a7f37; --bad: #cf222e;
  --wait: #9a6700; }
@media (prefers-color-scheme: dark) {
  :root { --soft: #8d96a0; --good: #3fb950; --bad: #f85149; --wait: #d29922; }
}
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; }
h2 { font-size: 1rem; margin: 1.8rem 0 .3rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.soft { color: var(--soft); }
.good { color: var(--good); }
.bad { color: var(--bad); }
.wait { color: var(--wait); }
.scroll { overflow-x: auto; }
#away { display: none; }
.away #away { display: block; }
.away main { opacity: .5; }
"""

_SCRIPT = """
async function refresh() {
  try {
    const answer = await fetch(location.href, {
      cache: "no-store", signal: AbortSignal.timeout(3000) });
    const text = await answer.text();
    if (!answer.ok) throw new Error(text);
    const page = new DOMParser().parseFromString(text, "text/html");
    document.querySelector("main").replaceWith(page.querySelector("main"));
    document.title = page.title;
    document.body.classList.remove("away");
  } catch (error) {
    document.body.classList.add("away");
  }
  setTimeout(refresh, 1000);
}
setTimeout(refresh, 1000);
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<noscript><meta http-equiv="refresh" content="2"></noscript>
<style>{style}</style>
</head>
<body>
<p id="away" class="bad">The monitor does not answer; requests go on without it.
What follows is the last that it said.</p>
<main>
{main}
</main>
<script>{script}</script>
</body>
</html>
"""

_MAX_MISSING = 12


def render_page(members: Mapping[str, Any], ready: Mapping[str, Any]) -> str:
    """Return the page for what ``/members`` and ``/readyz`` say; every value is escaped."""
    sections = (
        _head(members, ready),
        _section("Servers", _servers(members)),
        _section("Clients", _clients(members)),
        _section("Recent events", _events(members["events"])),
    )
    title = f"torch_eaas: {'ready' if ready['ready'] else 'not ready'}"
    return _PAGE.format(title=title, style=_STYLE, script=_SCRIPT, main="\n".join(sections))


def _head(members: Mapping[str, Any], ready: Mapping[str, Any]) -> str:
    tone = "good" if ready["ready"] else "wait" if members["waiting"] else "bad"
    state = "ready" if ready["ready"] else f"not ready: {ready['reason']}"
    lines = [
        "<h1>torch_eaas monitor</h1>",
        f'<p><strong class="{tone}">{escape(state)}</strong></p>',
    ]
    if ready["missing"]:
        lines.append(f"<p>Missing experts: {escape(_missing_text(ready['missing']))}</p>")
    model = members["model"]
    if model is not None:
        served = (
            f"model {model['fingerprint']}, {len(model['layers'])} layers with "
            f"{model['num_experts']} experts each"
        )
        lines.append(f"<p>{escape(served)}</p>")
    numbers = (
        f"term {members['term']}, placement version {members['version']}, "
        f"monitor {members['monitor']}"
    )
    lines.append(f'<p class="soft">{escape(numbers)}</p>')
    return "\n".join(lines)


def _missing_text(missing: Mapping[str, Sequence[int]]) -> str:
    layers = list(missing.items())
    shown = [f"layer {layer}: {_ranges(experts)}" for layer, experts in layers[:_MAX_MISSING]]
    more = len(layers) - len(shown)
    return "; ".join(shown) + (f"; and {more} more layers" if more else "")


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers with runs drawn together.

    Example:
        ``[0, 1, 2, 5]`` gives ``0-2, 5``.
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _servers(members: Mapping[str, Any]) -> str:
    live = [
        _server_row(server, "stuck" if server["stuck"] else server["state"])
        for server in members["servers"]
    ]
    dead = [_server_row(server, "suspect") for server in members["suspects"]]
    columns = (
        "Name", "State", "#Experts", "#Room", "#Heartbeat", "#Progress", "#Requests", "Placement",
        "Address",
    )  # fmt: skip
    return _table(columns, live + dead, "No server has joined.")


def _server_row(server: Mapping[str, Any], state: str) -> list[str]:
    tone = {"serving": "good", "draining": "wait"}.get(state, "bad")
    return [
        _name(server),
        f'<span class="{tone}">{escape(state)}</span>',
        str(server["experts"]),
        str(server["room"]),
        _age(server["age"]),
        _age(server["progress_age"]),
        _count(server, "requests"),
        _known(server),
        escape(server["address"]),
    ]


def _clients(members: Mapping[str, Any]) -> str:
    rows = [
        [_name(client), _age(client["age"]), _count(client, "dispatches"), _known(client)]
        for client in members["clients"]
    ]
    columns = ("Name", "#Heartbeat", "#Dispatches", "Placement")
    return _table(columns, rows, "No client has joined.")


def _events(events: Iterable[Mapping[str, Any]]) -> str:
    rows = [[_age(event["age"]), escape(event["kind"]), escape(event["text"])] for event in events]
    return _table(("#Ago", "Event", "What happened"), rows, "Nothing has happened yet.")


def _name(member: Mapping[str, Any]) -> str:
    return f'<span title="instance {escape(member["instance"])}">{escape(member["label"])}</span>'


def _age(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _count(member: Mapping[str, Any], name: str) -> str:
    value = member["counters"].get(name)
    return '<span class="soft">-</span>' if value is None else f"{value:.0f}"


def _known(member: Mapping[str, Any]) -> str:
    known = member["known"]
    return f"{known['term']}.{known['version']}"


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{body}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> str:
    """Return a table; a column that begins with # holds numbers. Cells are HTML already."""
    if not rows:
        return f'<p class="soft">{escape(empty)}</p>'
    tones = [' class="number"' if column.startswith("#") else "" for column in columns]
    head = "".join(
        f"<th{tone}>{escape(column.lstrip('#'))}</th>"
        for tone, column in zip(tones, columns, strict=True)
    )
    lines = [
        "<tr>"
        + "".join(f"<td{tone}>{cell}</td>" for tone, cell in zip(tones, row, strict=True))
        + "</tr>"
        for row in rows
    ]
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
