"""The results of a race as text and tables."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from torpor.bench.measurements import COMPILED, OFF, Results, Row, WorkloadOutcome, facts

Table = tuple[list[str], list[list[str]]]  # columns, rows


def headline(results: Results) -> str:
    """Date, machine, versions and settings."""
    known = facts(results.device, results.threads)
    return described(known, results.date, results.rounds, results.load)


def described(known: dict[str, Any], date: str, rounds: int, load: list[float]) -> str:
    """The conditions of a run as text."""
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    variables = [f"\n{name}={value}" for name, value in known["environment"].items()]
    return (
        f"{date}   {known['machine']}   {versions}\n"
        f"torch threads: {known['threads']}; medians of {rounds} round{'s' * (rounds > 1)}; "
        f"load average before and after: {', '.join(map(str, load))}{''.join(variables)}"
    )


def table(outcome: WorkloadOutcome) -> Table:
    """A table for one workload, with a row per runner."""
    rows = [_cells(outcome, row) for row in outcome.rows]
    return tabled(
        {n: row[n] for n in row if n in ALWAYS or any(row[n] for row in rows)} for row in rows
    )


def tabled(rows: Iterable[dict[str, str]]) -> Table:
    """Rows as dictionaries with equal keys, as a table."""
    listed = list(rows)
    return list(listed[0]) if listed else [], [list(row.values()) for row in listed]


ALWAYS = ("runner", "ms", "/eager", "note")  # other columns are omitted if empty


def _cells(outcome: WorkloadOutcome, row: Row) -> dict[str, str]:
    both = all(outcome.row(name) is not None for name in COMPILED)
    ran = bool(row.samples)
    return {
        "runner": row.runner,
        "ms": number(row.ms),
        "±": f"{row.spread:.0%}" if ran else "",
        "/eager": ratio(outcome.ratio(row, "eager")),
        "/compile": ratio(outcome.ratio(row, "compile")),
        "/best compile": ratio(outcome.ratio(row, *COMPILED)) if both else "",
        "recording ms": number(row.recording_ms) if row.records else "",
        "MiB": in_mib(row.memory),
        "reserved MiB": in_mib(row.reserved),
        "faults": f"{median(row.faults):,.0f}" if row.faults else "",
        "first s": f"{row.first_s:.1f}" if ran else "",
        "cold s": f"{row.cold_s:.1f}" if ran else "",
        "compiles": str(row.compiles) if row.compiles else "",
        "note": "; ".join(notes(outcome, row)),
    }


def notes(outcome: WorkloadOutcome, row: Row) -> list[str]:
    """Caveats about a row."""
    if row.error:
        return [shortened(row.error)]
    said = []
    if row.tracing_bound:
        said.append("tracing-bound")
    if not row.settled:
        said.append("still compiled when the warm-up ended")
    if row.late_compiles:
        said.append(f"{row.late_compiles} compiles while measured")
    difference = outcome.loss_difference(row)
    if difference is not None and difference > OFF:
        said.append(f"result off by {difference:.1%}")
    return said


def shortened(text: str, most: int = 100) -> str:
    """The text as one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def number(value: float | None, none: str = "") -> str:
    if value is None:
        return none
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def ratio(value: float | None, none: str = "") -> str:
    return none if value is None else f"{value:.2f}"


def in_mib(nbytes: float | None) -> str:
    return f"{nbytes / 2**20:,.0f}" if nbytes else ""
