"""What a race came to, in words and columns."""

from __future__ import annotations

from statistics import median
from typing import Any

from torpor.bench.results import COMPILED, OFF, Outcome, Results, Row, facts

Table = tuple[list[str], list[list[str]]]  # columns, rows


def headline(results: Results) -> str:
    """When, on what, with what."""
    known = facts(results.device, results.threads)
    return described(known, results.date, results.rounds, results.load)


def described(known: dict[str, Any], date: str, rounds: int, load: list[float]) -> str:
    """The facts of a run in words."""
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    variables = [f"\n{name}={value}" for name, value in known["environment"].items()]
    return (
        f"{date}   {known['machine']}   {versions}\n"
        f"torch threads: {known['threads']}; medians of {rounds} round{'s' * (rounds > 1)}; "
        f"load average before and after: {', '.join(map(str, load))}{''.join(variables)}"
    )


def table(outcome: Outcome) -> Table:
    """One workload: a row for each runner."""
    rows = [_cells(outcome, row) for row in outcome.rows]
    columns = [name for name in rows[0] if name in ALWAYS or any(row[name] for row in rows)]
    return columns, [[row[name] for name in columns] for row in rows]


ALWAYS = ("runner", "ms", "/eager", "note")  # other columns are left out where they are empty


def _cells(outcome: Outcome, row: Row) -> dict[str, str]:
    both = all(outcome.row(name) is not None for name in COMPILED)
    ran = bool(row.samples)
    return {
        "runner": row.runner,
        "ms": _number(row.ms),
        "±": f"{row.spread:.0%}" if ran else "",
        "/eager": _ratio(outcome.ratio(row, "eager")),
        "/compile": _ratio(outcome.ratio(row, "compile")),
        "/best compile": _ratio(outcome.ratio(row, *COMPILED)) if both else "",
        "recording ms": _number(row.recording_ms) if row.records else "",
        "MiB": f"{row.memory / 2**20:,.0f}" if row.memory else "",
        "reserved MiB": f"{row.reserved / 2**20:,.0f}" if row.reserved else "",
        "faults": f"{median(row.faults):,.0f}" if row.faults else "",
        "first s": f"{row.first_s:.1f}" if ran else "",
        "cold s": f"{row.cold_s:.1f}" if ran else "",
        "compiles": str(row.compiles) if row.compiles else "",
        "note": "; ".join(notes(outcome, row)),
    }


def notes(outcome: Outcome, row: Row) -> list[str]:
    """What a reader of the row has to know."""
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
    """The text in one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
