"""The scorecard as one self-contained HTML file."""

from __future__ import annotations

import html
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

import torpor
from torpor.testing.scorecard import STATUSES, OpResult, Point, Scorecard

SECTIONS = {
    "contract": "The methods of Backend: types, data, devices, graphs",
    "buffers": "Data and devices of its own, fallbacks, decompositions, torch.compile",
    "laziness": "What runs, when, how often, and what a step leaves behind",
    "errors": "What the user sees when something fails, and that they can go on",
    "models": "Five training steps against eager's",
}


def write_html(card: Scorecard, path: Path) -> None:
    """Write the report of a run to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(card), encoding="utf-8")


def render(card: Scorecard) -> str:
    """The whole page."""
    title = f"{card.backend}: torpor conformance"
    body = "\n".join([_header(card), _tiles(card), _bar(card), _sections(card), _operators(card)])
    return _PAGE.replace("{{title}}", html.escape(title)).replace("{{body}}", body)


def _header(card: Scorecard) -> str:
    verdict = "conforms" if card.held else "does not conform"
    kind = "good" if card.held else "bad"
    facts = [
        f"tensors on <b>{html.escape(card.device)}</b>",
        f"torpor {html.escape(torpor.__version__)}",
        f"torch {html.escape(torch.__version__)}",
        f"Python {platform.python_version()}",
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    ]
    return (
        f'<header><p class="kicker">torpor conformance</p><h1>{html.escape(card.backend)} '
        f'<span class="verdict {kind}">{verdict}</span></h1>'
        f'<p class="facts">{" · ".join(facts)}</p></header>'
    )


def _tiles(card: Scorecard) -> str:
    tiles = []
    for name, counts in card.sections().items():
        asked = counts["held"] + counts["broken"]
        kind = "bad" if counts["broken"] else "good"
        note = f"{counts['skipped']} skipped" if counts["skipped"] else "points held"
        tiles.append(_tile(name, f"{counts['held']}<small>/{asked}</small>", note, kind))
    if card.ops:
        counts_of_ops = card.statuses()
        judged = len(card.ops) - counts_of_ops["skipped"]
        right = judged - counts_of_ops["wrong"]
        kind = "bad" if counts_of_ops["wrong"] else "good"
        tiles.append(_tile("operators", f"{right}<small>/{judged}</small>", "right", kind))
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _tile(name: str, number: str, note: str, kind: str) -> str:
    return (
        f'<div class="tile {kind}"><span>{html.escape(name)}</span><strong>{number}</strong>'
        f"<em>{html.escape(note)}</em></div>"
    )


def _bar(card: Scorecard) -> str:
    """How the operators ran, as a stacked bar with a legend."""
    if not card.ops:
        return ""
    counts = {status: number for status, number in card.statuses().items() if number}
    parts = "".join(
        f'<i class="{status}" style="flex-grow:{number}" title="{number} {status}"></i>'
        for status, number in counts.items()
    )
    legend = "".join(
        f'<li><i class="{status}"></i><b>{number}</b> {status}'
        f"<small>{html.escape(STATUSES[status])}</small></li>"
        for status, number in counts.items()
    )
    late = sum(card.falls_back_later(result) for result in card.ops)
    note = f"<small>{late} of the native ones fall back in their backward.</small>" if late else ""
    return (
        f'<section><h2>How {len(card.ops)} operators ran, forward</h2><div class="bar">{parts}'
        f'</div><ul class="legend">{legend}</ul>{note}</section>'
    )


def _sections(card: Scorecard) -> str:
    return "".join(
        _section(name, [p for p in card.points if p.section == name]) for name in card.sections()
    )


def _section(name: str, points: list[Point]) -> str:
    order = {"broken": 0, "skipped": 1, "held": 2}
    rows = "".join(_row(p) for p in sorted(points, key=lambda p: order[p.outcome]))
    broken = sum(point.outcome == "broken" for point in points)
    held = sum(point.outcome == "held" for point in points)
    count = f"{broken} broken" if broken else f"{held} held"
    return (
        f"<section><details{' open' if broken else ''}><summary><h2>{html.escape(name)}</h2>"
        f"<span>{html.escape(SECTIONS.get(name, ''))}</span><b>{count}</b></summary>"
        f'<table class="points">{rows}</table></details></section>'
    )


def _row(point: Point) -> str:
    mark = {"held": "✓", "broken": "✗", "skipped": "–"}[point.outcome]
    doc = f"<small>{html.escape(point.doc)}</small>" if point.doc else ""
    detail = ""
    if point.outcome == "broken":
        detail = f"<pre>{html.escape(_tail(point.detail))}</pre>"
    elif point.detail:
        detail = f"<small>{html.escape(point.detail)}</small>"
    return (
        f'<tr class="{point.outcome}"><td class="mark">{mark}</td>'
        f"<td>{html.escape(point.name)}{doc}{detail}</td></tr>"
    )


def _tail(text: str, lines: int = 24) -> str:
    """The end of a traceback, which has the reason."""
    kept = text.rstrip().splitlines()
    return "\n".join(kept if len(kept) <= lines else ["…", *kept[-lines:]])


def _operators(card: Scorecard) -> str:
    if not card.ops:
        return ""
    order = list(STATUSES)
    worst_first = ["wrong", "fallback", "decomposed", "core", "skipped", "native"]
    results = sorted(card.ops, key=lambda r: (worst_first.index(r.status), r.op))
    rows = "".join(_op_row(result) for result in results)
    buttons = "".join(
        f'<button data-status="{status}">{status}</button>'
        for status in order
        if any(result.status == status for result in results)
    )
    return (
        '<section><h2>Operators</h2><div class="tools">'
        '<input id="find" type="search" placeholder="find an operator" aria-label="find">'
        f'<button data-status="" class="on">all</button>{buttons}</div>'
        '<table id="ops"><thead><tr><th>operator</th><th>how</th><th>samples</th><th></th></tr>'
        f"</thead><tbody>{rows}</tbody></table></section>"
    )


def _op_row(result: OpResult) -> str:
    wrong = result.status == "wrong"
    detail = html.escape(result.detail)
    if Scorecard.falls_back_later(result):
        names = ", ".join(result.backward_fallbacks)
        detail += html.escape(f" backward: eager's kernels for {names}")
    shown = f"<pre>{detail}</pre>" if wrong else f"<small>{detail}</small>"
    return (
        f'<tr data-status="{result.status}"><td><code>{html.escape(result.op)}</code></td>'
        f'<td><span class="chip {result.status}">{result.status}</span></td>'
        f'<td class="number">{result.samples}</td><td>{shown}</td></tr>'
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{title}}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { --ink:#1d2430; --dim:#667085; --line:#e3e7ee; --paper:#fff; --ground:#f6f7f9;
  --good:#1a7f4b; --bad:#c0362c; --native:#2a9d6f; --decomposed:#4c8fd6; --fallback:#e0a63a;
  --core:#9aa4b5; --wrong:#c0362c; --skipped:#d5dae3; color-scheme:light dark; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6e9ef; --dim:#98a2b3; --line:#2c3444;
  --paper:#171c26; --ground:#10141c; --good:#4cc38a; --bad:#f2776b; --skipped:#3a4354; } }
* { box-sizing:border-box }
body { margin:0; background:var(--ground); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
main { max-width:1040px; margin:0 auto; padding:32px 20px 80px }
.kicker { margin:0; color:var(--dim); text-transform:uppercase; letter-spacing:.12em;
  font-size:12px }
h1 { margin:4px 0 6px; font-size:32px; display:flex; gap:14px; align-items:center; flex-wrap:wrap }
h2 { font-size:18px; margin:0 0 12px } summary h2 { text-transform:capitalize }
.verdict { font-size:14px; font-weight:600; padding:4px 12px; border-radius:99px; color:#fff }
.verdict.good { background:#1a7f4b } .verdict.bad { background:#c0362c }
.facts { margin:0; color:var(--dim) }
section { background:var(--paper); border:1px solid var(--line); border-radius:12px;
  padding:20px; margin-top:18px }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:14px;
  background:none; border:0; padding:0 }
.tile { background:var(--paper); border:1px solid var(--line); border-left:4px solid var(--good);
  border-radius:12px; padding:14px 16px; display:flex; flex-direction:column }
.tile.bad { border-left-color:var(--bad) }
.tile span { color:var(--dim); text-transform:capitalize }
.tile strong { font-size:28px; line-height:1.2; font-variant-numeric:tabular-nums }
.tile small { display:inline; font-size:16px; color:var(--dim); font-weight:400 }
.tile em { font-style:normal; color:var(--dim); font-size:13px }
.bar { display:flex; gap:2px; height:22px; border-radius:6px; overflow:hidden }
.bar i { min-width:3px } .legend { list-style:none; display:grid; gap:8px 24px; padding:0;
  margin:16px 0 0; grid-template-columns:repeat(auto-fit,minmax(300px,1fr)) }
.legend li { display:grid; grid-template-columns:14px auto 1fr; gap:0 8px; align-items:baseline;
  align-content:start }
.legend i { width:12px; height:12px; border-radius:3px } .legend small { grid-column:2/-1 }
small { display:block; color:var(--dim); font-size:13px }
.native { background:var(--native) } .decomposed { background:var(--decomposed) }
.fallback { background:var(--fallback) } .core { background:var(--core) }
.wrong { background:var(--wrong) } .skipped { background:var(--skipped) }
summary { cursor:pointer; display:flex; gap:14px; align-items:baseline }
summary::before { content:"▸"; color:var(--dim) } details[open] summary::before { content:"▾" }
summary b { margin-left:auto; font-weight:500; color:var(--dim); white-space:nowrap }
summary h2 { margin:0 } summary span { color:var(--dim) }
details[open] summary { margin-bottom:12px }
table { border-collapse:collapse; width:100% } td, th { padding:7px 8px; vertical-align:top;
  border-top:1px solid var(--line); text-align:left } th { color:var(--dim); font-weight:500 }
tr.held, tr.broken, tr.skipped { background:none } .mark { width:26px; font-weight:700 }
.held .mark { color:var(--good) } .broken .mark { color:var(--bad) } .number { color:var(--dim) }
pre { margin:8px 0 0; padding:12px; border-radius:8px; background:var(--ground); overflow:auto;
  font-size:12.5px; line-height:1.45; white-space:pre-wrap; overflow-wrap:anywhere }
.chip { color:#fff; border-radius:99px; padding:2px 10px; font-size:12.5px }
.chip.skipped, .chip.fallback { color:#1d2430 }
.tools { display:flex; gap:8px; flex-wrap:wrap; margin-bottom:12px }
input, button { font:inherit; color:inherit; background:var(--ground); border:1px solid var(--line);
  border-radius:8px; padding:6px 12px } input { flex:1 1 220px } button { cursor:pointer }
button.on { background:var(--ink); color:var(--paper) }
</style></head><body><main>
{{body}}
</main>
<script>
const find = document.getElementById("find");
let status = "";
function filter() {
  const text = find.value.toLowerCase();
  for (const row of document.querySelectorAll("#ops tbody tr"))
    row.hidden = (status && row.dataset.status !== status) ||
      !row.cells[0].textContent.toLowerCase().includes(text);
}
if (find) {
  find.addEventListener("input", filter);
  for (const button of document.querySelectorAll(".tools button"))
    button.addEventListener("click", () => {
      status = button.dataset.status;
      for (const other of document.querySelectorAll(".tools button"))
        other.classList.toggle("on", other === button);
      filter();
    });
}
</script></body></html>
"""
