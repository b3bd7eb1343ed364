"""The scorecard as Markdown, to document a complete run."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import torch

import torpor
from torpor.testing.scorecard import STATUSES, OpResult, Scorecard

Row = Sequence[object]


def render(card: Scorecard) -> str:
    """The page: how it was run, points, operators, and those that did not run natively."""
    return "\n\n".join([*_head(card), *_points(card), *_operators(card)]) + "\n"


def table(columns: Row, rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def _head(card: Scorecard) -> list[str]:
    facts = (
        ("date", datetime.now(UTC).strftime("%Y-%m-%d")),
        ("torpor", torpor.__version__),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("machine", f"{platform.system()} {platform.machine()}"),
        ("tensors on", card.device),
        ("verdict", "conforms" if card.held else "does not conform"),
    )
    return [f"# {card.backend} against eager", table(("", ""), facts)]


def _points(card: Scorecard) -> list[str]:
    if not card.points:
        return []
    counts = sorted(card.sections().items())
    rows: list[Row] = [(name, c["held"], c["broken"], c["skipped"]) for name, c in counts]
    parts = ["## Points", table(("section", "held", "broken", "skipped"), rows)]
    for outcome in ("broken", "skipped"):
        found = [point for point in card.points if point.outcome == outcome]
        rows = [(p.section, p.name, _why(p.detail)) for p in found]
        parts += _listed(f"Points {outcome}", ("section", "point", "why"), rows)
    return parts


def _why(detail: str) -> str:
    """The line with the reason of a failure or a skip."""
    lines = [line for line in detail.splitlines() if line.startswith("E ")] or detail.splitlines()
    return lines[0].removeprefix("E ").strip()[:200] if lines else ""


def _operators(card: Scorecard) -> list[str]:
    if not card.ops:
        return []
    counted = card.statuses()
    rows = [(status, counted[status], meaning) for status, meaning in STATUSES.items()]
    late = [result for result in card.ops if card.falls_back_later(result)]
    samples = sum(result.samples for result in card.ops)
    summary = f"{len(card.ops)} entries of op_db, {samples} samples run forward or backward."
    parts = ["## Operators", summary, table(("how", "entries", "meaning"), rows)]
    parts += _of_status(card.ops, "wrong")
    parts += _of_status(card.ops, "fallback")
    late_rows = [(r.op, ", ".join(r.backward_fallbacks)) for r in _sorted(late)]
    parts += _listed("fallback in the backward only", ("entry", "why"), late_rows)
    for status in ("decomposed", "skipped"):
        parts += _of_status(card.ops, status)
    return parts


def _sorted(results: Iterable[OpResult]) -> list[OpResult]:
    return sorted(results, key=lambda result: result.op)


def _of_status(ops: Iterable[OpResult], status: str) -> list[str]:
    found = _sorted(result for result in ops if result.status == status)
    return _listed(status, ("entry", "why"), [(r.op, _why(r.detail)) for r in found])


def _listed(title: str, columns: Row, rows: Sequence[Row]) -> list[str]:
    return [f"### {title} ({len(rows)})", table(columns, rows)] if rows else []
