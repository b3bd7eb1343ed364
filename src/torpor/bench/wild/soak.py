"""Criteria for a program whose graphs never repeat: low overhead, and no memory growth."""

from __future__ import annotations

from torpor.bench.report import Table, in_mib, number, ratio, tabled
from torpor.bench.wild.outcome import ProgramOutcome, ProgramRun
from torpor.bench.wild.report import DASH

MOST_STEP = 1.1  # times eager
MOST_GROWTH = 16 << 20  # bytes more than eager's
RUNNERS = ("eager", "torpor")


def growth(run: ProgramRun) -> int:
    """By how many bytes the process has grown in the last three quarters of its steps."""
    marks = run.marks
    return marks[-1].resident - marks[len(marks) // 4].resident if marks else 0


def table(outcome: ProgramOutcome) -> Table:
    """A row per runner."""
    return tabled(_cells(outcome, name) for name in outcome.rows)


def _cells(outcome: ProgramOutcome, runner: str) -> dict[str, str]:
    row = outcome.rows[runner]
    return {
        "runner": runner,
        "steps": f"{row.last.steps:,}",
        "step ms": number(row.step_ms, DASH),
        "/eager": ratio(outcome.ratio(runner, "step_ms"), DASH),
        "total s": number(row.total_s, DASH),
        "MiB": in_mib(row.last.memory),
        "growth MiB": f"{growth(row.last) / 2**20:+,.1f}",
        "graphs": f"{row.last.graphs:,}" if row.last.graphs else "",
    }


def failures(outcome: ProgramOutcome) -> list[str]:
    """The targets that were missed, as text."""
    found, times = [], outcome.ratio("torpor", "step_ms")
    grown = {name: growth(row.last) for name, row in outcome.rows.items()}
    beyond = grown.get("torpor", 0) - max(0, grown.get("eager", 0))
    errors = [f"{name}: {row.error}" for name, row in outcome.rows.items() if row.error]
    if times is not None and times > MOST_STEP:
        found.append(f"step {times:.2f} × eager, at most {MOST_STEP}")
    if beyond > MOST_GROWTH:
        found.append(f"memory grew by {beyond / 2**20:.0f} MiB more than eager's")
    if outcome.stopped:
        found.append(f"stopped at step {outcome.rows['torpor'].last.steps:,} of {outcome.steps:,}")
    return errors + found
