"""The numbers of a run as tables, as JSON, as a picture, and in `docs/benchmarks.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.bars import OPTIMIZERS, bars, ratio, total
from benchmarks.clock import Time, medians
from benchmarks.cold import FEW, MANY
from benchmarks.results import Results, machine, versions
from benchmarks.tracing import Subject
from benchmarks.worker import ROOT

OUT = ROOT / "benchmarks" / "out"
DOCS = ROOT / "docs" / "benchmarks.md"
TITLES = {
    "eager": "eager, the whole step",
    "torpor": "torpor, device lazy",
    "torpor-concrete": "torpor, torpor.lazy(model)",
    "torch-lazy": "torch._lazy",
}
Row = Sequence[str]


def text(results: Results) -> str:
    """Everything, as it is printed."""
    parts = [_heading(results)]
    if results.subjects:
        parts.append(_tracing(results))
    if results.cold or results.imports:
        parts.append(_start_up(results))
    if results.ops or results.instructions:
        parts.append(_ops(results))
    if results.recorders or results.recorder_instructions:
        parts.append(_recorders(results))
    if results.imports and results.imports.offenders:
        parts.append(_offenders(results.imports.offenders))
    if found := bars(results):
        rows = [
            (b.name, f"{b.measured.cpu:.2f}", f"{b.measured.wall:.2f}", f"{b.limit:.2f} {b.unit}",
             b.verdict) for b in found
        ]  # fmt: skip
        parts.append(table(("bar (CPU time decides)", "CPU", "wall", "at most", "verdict"), rows))
    if results.notes:
        parts.append("\n".join(f"note: {note}" for note in results.notes))
    return "\n\n".join(parts)


def table(columns: Row, rows: Sequence[Row]) -> str:
    """Aligned text: first column left, the others right; a row of one cell is a heading."""
    full = [row for row in (columns, *rows) if len(row) > 1]
    widths = [max(map(len, cells)) for cells in zip_longest(*full, fillvalue="")]
    lines = [_line(columns, widths), "  ".join("-" * width for width in widths)]
    return "\n".join(lines + [_line(row, widths) for row in rows])


def _line(row: Row, widths: Sequence[int]) -> str:
    if len(row) == 1:
        return row[0]
    cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]
    return "  ".join(cells).rstrip()


def _heading(results: Results) -> str:
    lines = [f"{results.date}   {machine()}   {versions()}"]
    if results.load:
        busy = ", ".join(f"{value:.1f}" for value in results.load)
        lines.append(f"torch threads: {results.threads}; load average before and after: {busy}")
    return "\n".join(lines)


# -- the step ----------------------------------------------------------------------------------


def _tracing(results: Results) -> str:
    columns = (
        f"12-layer GPT step, warm, medians of {results.repeat}", "CPU ms", "best", "wall ms",
        "cut CPU", "cut wall", "/eager CPU", "wall", "/_lazy CPU", "wall", "ops",
    )  # fmt: skip
    rows: list[Row] = []
    for optimizer, title in OPTIMIZERS.items():
        rows.append((f"tracing, {title}",))
        rows += [_subject(results, row) for row in results.subjects if row.optimizer == optimizer]
    return table(columns, rows)


def _subject(results: Results, row: Subject) -> Row:
    title = f"  {TITLES[row.system]}"
    if not row.steps:
        return (title, *["failed"] * 10)
    eager = ratio(row, results.subject("eager", row.optimizer))
    peer = ratio(row, results.subject("torch-lazy", row.optimizer))
    lazy = row.system != "eager"
    cpu, wall = _milliseconds(row.trace)
    return (
        title,
        cpu,
        f"{min(step.trace.cpu for step in row.steps) * 1e3:,.1f}",
        wall,
        *(_milliseconds(row.cut) if lazy else ("", "")),
        *_ratios(eager),
        *(_ratios(peer) if lazy else ("", "")),
        f"{row.recorded:,}" if lazy else "",
    )


def _milliseconds(time: Time) -> tuple[str, str]:
    return f"{time.cpu * 1e3:,.1f}", f"{time.wall * 1e3:,.1f}"


def _ratios(time: Time | None) -> tuple[str, str]:
    return ("", "") if time is None else (f"{time.cpu:.2f}", f"{time.wall:.2f}")


# -- the start -----------------------------------------------------------------------------------


def _start_up(results: Results) -> str:
    rows: list[Row] = []
    if cold := results.cold:
        rows += [
            (f"first trace, {MANY} layers", *_milliseconds(medians(cold.many.cold))),
            (f"first trace, {FEW} layers", *_milliseconds(medians(cold.few.cold))),
            (f"warm trace, {MANY} layers", *_milliseconds(medians(cold.many.warm))),
            (f"warm trace, {FEW} layers", *_milliseconds(medians(cold.few.warm))),
            (f"{FEW} layers cold + {MANY - FEW} warm", *_milliseconds(cold.allowed_cost)),
            ("one more layer, cold / warm", f"{cold.layer_ratio:.1f} ×", ""),
        ]
    if imported := results.imports:
        rows += [
            ("import torch", *_milliseconds(medians(imported.torch))),
            ("import torpor, after it", *_milliseconds(imported.added)),
        ]
    return table(("in fresh processes, medians", "CPU ms", "wall ms"), rows)


def _offenders(found: list[tuple[str, float, float]]) -> str:
    rows = [(name, f"{own:.1f}", f"{total:.1f}") for name, own, total in found]
    return table(("imported by torpor, slowest first", "own ms", "with imports"), rows)


# -- single ops ------------------------------------------------------------------------------------


def _ops(results: Results) -> str:
    times = {row["op"]: row for row in (results.ops or {}).get("ops", [])}
    counts = {row["op"]: row for row in (results.instructions or {}).get("ops", [])}
    columns = (
        "ns per op, same call repeated", "calls", "torpor", "floor", "above", "eager", "/eager",
        "in step", "instr.", "floor", "above",
    )  # fmt: skip
    rows: list[Row] = [
        (name, *_times(times.get(name)), *_counts(counts.get(name))) for name in times or counts
    ]
    if results.ops:
        rows.append(_sum(results.ops))
    parts = [table(columns, rows)]
    if counted := results.instructions:
        parts.append(
            f"{counted['step'] / counted['recorded']:,.0f} instructions per recorded op of a whole"
            f" 2-layer step, {counted['cut']:,} for its cut ({results.counter})"
        )
    return "\n".join(parts)


def _times(row: dict[str, Any] | None) -> Row:
    if row is None:
        return ("",) * 7
    torpor, floor, eager = row["torpor"], row["floor"], row["eager"]
    return (
        f"{row['calls']}", f"{torpor:,.0f}", f"{floor:,.0f}", f"{torpor - floor:,.0f}",
        f"{eager:,.0f}", f"{torpor / eager:.2f}", f"{row['inside']:,.0f}",
    )  # fmt: skip


def _counts(row: dict[str, Any] | None) -> Row:
    if row is None:
        return ("", "", "")
    torpor, floor = row["torpor"], row["floor"]
    return f"{torpor:,.0f}", f"{floor:,.0f}", f"{torpor - floor:,.0f}"


def _sum(ops: dict[str, Any]) -> Row:
    def total(kind: str) -> float:
        return float(sum(row[kind] * row["calls"] for row in ops["ops"]))

    calls = sum(row["calls"] for row in ops["ops"])
    whole = {"calls": calls} | {k: total(k) / 1e3 for k in ("torpor", "floor", "eager", "inside")}
    name = f"µs for these {calls:,} of {ops['recorded']:,} ops"
    return (name, *_times(whole), "", "", "")


# -- recorders -----------------------------------------------------------------------------------


_PATHS = ("torpor", "floor")


def _recorders(results: Results) -> str:
    timed = {row["op"]: row for row in (results.recorders or {}).get("ops", [])}
    counted = {row["op"]: row for row in (results.recorder_instructions or {}).get("ops", [])}
    columns = (
        "ns per recorded op, model suite", "calls", "torpor", "floor", "/floor",
        "instr. torpor", "floor", "/floor",
    )  # fmt: skip
    rows: list[Row] = []
    for name in timed or counted:
        calls = (timed.get(name) or counted[name])["calls"]
        rows.append((name, f"{calls}", *_paths(_cpu(timed.get(name))), *_paths(counted.get(name))))
    if timed:
        whole = {way: total(list(timed.values()), way).cpu / 1e3 for way in _PATHS}
        calls = sum(row["calls"] for row in timed.values())
        rows.append(("µs for these", f"{calls:,}", *_paths(whole), *_paths(None)))
    return table(columns, rows)


def _cpu(row: dict[str, Any] | None) -> dict[str, float] | None:
    return row and {way: row[way][1] for way in _PATHS}


def _paths(row: dict[str, Any] | None) -> Row:
    if row is None:
        return ("",) * 3
    torpor, floor = (row[way] for way in _PATHS)
    return (f"{torpor:,.0f}", f"{floor:,.0f}", f"{torpor / floor:.2f}")


# -- where it goes ---------------------------------------------------------------------------------


def write_json(results: Results) -> Path:
    OUT.mkdir(exist_ok=True)
    content = results.as_json() | {"bars": [bar.as_json() for bar in bars(results)]}
    dated = OUT / f"bench-{re.sub('[^0-9]', '', results.date)}.json"
    for path in (dated, OUT / "latest.json"):
        path.write_text(json.dumps(content, indent=1) + "\n")
    return dated


def write_docs(results: Results) -> Path:
    """Put the tables where `docs/benchmarks.md` shows the last run."""
    begin, end = "<!-- last run -->\n", "<!-- end of last run -->"
    before, rest = DOCS.read_text().split(begin)
    after = rest.split(end)[1]
    DOCS.write_text(f"{before}{begin}\n```text\n{text(results)}\n```\n\n{end}{after}")
    return DOCS


def plot(results: Results) -> str:
    """A picture of the bars; says where it is, or why there is none."""
    found = bars(results)
    try:
        from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return "no picture: matplotlib is not installed"
    if not found:
        return "no picture: no bar was measured"
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(found) + 1), layout="constrained")
    shares = [bar.measured.cpu / bar.limit for bar in found]
    colours = ["#2a9d8f" if bar.passed else "#e76f51" for bar in found]
    drawn = axes.barh([bar.name for bar in found], shares, color=colours)
    axes.bar_label(drawn, [f"{bar.measured.cpu:.2f} {bar.unit}" for bar in found], padding=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("share of what is allowed (CPU time)")
    axes.margins(x=0.15)
    axes.invert_yaxis()
    path = OUT / "latest.png"
    figure.savefig(path, dpi=120)
    return f"picture: {path.relative_to(ROOT)}"
