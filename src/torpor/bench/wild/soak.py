"""A program whose graphs never come back, for many steps: it must cost little and keep nothing."""

from __future__ import annotations

from torpor.bench.report import Table
from torpor.bench.wild.outcome import Outcome, Run

MOST_STEP = 1.1  # times eager
MOST_GROWTH = 16 << 20  # bytes, beyond eager's
RUNNERS = ("eager", "torpor")


def growth(run: Run) -> int:
    """Bytes by which the process has grown in the last three quarters of its steps."""
    marks = run.marks
    return marks[-1].resident - marks[len(marks) // 4].resident if marks else 0


def table(outcome: Outcome) -> Table:
    """A row for each runner."""
    columns = ["runner", "steps", "step ms", "/eager", "total s", "MiB", "growth MiB", "graphs"]
    return columns, [_cells(outcome, name) for name in outcome.rows]


def _cells(outcome: Outcome, runner: str) -> list[str]:
    row = outcome.rows[runner]
    step, ratio, total = row.step_ms, outcome.ratio(runner, "step_ms"), row.total_s
    return [
        runner,
        f"{row.last.steps:,}",
        "–" if step is None else f"{step:.2f}",
        "–" if ratio is None else f"{ratio:.2f}",
        "–" if total is None else f"{total:.1f}",
        f"{row.last.memory / 2**20:,.0f}",
        f"{growth(row.last) / 2**20:+,.1f}",
        f"{row.last.graphs:,}" if row.last.graphs else "",
    ]


def failures(outcome: Outcome) -> list[str]:
    """What is promised and does not hold, in words."""
    found, ratio = [], outcome.ratio("torpor", "step_ms")
    grown = {name: growth(row.last) for name, row in outcome.rows.items()}
    beyond = grown.get("torpor", 0) - max(0, grown.get("eager", 0))
    errors = [f"{name}: {row.error}" for name, row in outcome.rows.items() if row.error]
    if ratio is not None and ratio > MOST_STEP:
        found.append(f"step {ratio:.2f} × eager, at most {MOST_STEP}")
    if beyond > MOST_GROWTH:
        found.append(f"memory grew by {beyond / 2**20:.0f} MiB more than eager's")
    if outcome.stopped:
        found.append(f"stopped at step {outcome.rows['torpor'].last.steps:,} of {outcome.steps:,}")
    return errors + found
