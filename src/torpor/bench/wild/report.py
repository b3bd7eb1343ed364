"""The results of ordinary programs as tables."""

from __future__ import annotations

from torpor.bench.measurements import facts
from torpor.bench.report import Table, described, in_mib, number, ratio, shortened, tabled
from torpor.bench.wild.loop import GRACE
from torpor.bench.wild.measure import WildPlan
from torpor.bench.wild.outcome import ProgramOutcome, Wild

MOST_STEP = 1.05  # times eager, per program
MOST_STEP_MEAN = 0.95
MOST_TOTAL = 1.2
DASH = "–"


def headline(plan: WildPlan, wild: Wild) -> str:
    """Date, machine, versions and settings."""
    return described(facts("cpu", plan.threads), wild.date, plan.rounds, wild.load)


def step_table(wild: Wild) -> Table:
    """The time of a step after warm-up."""
    columns, rows = tabled(map(_step_cells, wild.outcomes))
    means = _means(wild, {"torpor ×": "step_ms", "CPU ×": "step_cpu_ms", "compile ×": "step_ms"})
    return columns, [*rows, [means.get(name, "") for name in columns]]


def _means(wild: Wild, ratios: dict[str, str]) -> dict[str, str]:
    """The last row of a table, by column."""
    return {"program": "geometric mean"} | {
        column: _ratio(wild.mean("compile" if "compile" in column else "torpor", what))
        for column, what in ratios.items()
    }


def _step_cells(outcome: ProgramOutcome) -> dict[str, str]:
    slow = outcome.slow_steps()
    return {
        "program": outcome.program,
        "eager ms": _number(outcome, "eager", "step_ms"),
        "torpor ms": _number(outcome, "torpor", "step_ms"),
        "torpor ×": _ratio(outcome.ratio("torpor", "step_ms")),
        "CPU ×": _ratio(outcome.ratio("torpor", "step_cpu_ms")),
        "compile ms": _number(outcome, "compile", "step_ms"),
        "compile ×": _ratio(outcome.ratio("compile", "step_ms")),
        "slow steps": "" if slow is None else f"{slow:,}",
    }


def total_table(wild: Wild) -> Table:
    """The time of the whole run."""
    columns, rows = tabled(map(_total_cells, wild.outcomes))
    means = _means(wild, {"torpor ×": "total_s", "compile ×": "total_s", "MiB ×": "memory"})
    return columns, [*rows, [means.get(name, "") for name in columns]]


def _total_cells(outcome: ProgramOutcome) -> dict[str, str]:
    ours = outcome.rows.get("torpor")
    ran = ours is not None and bool(ours.runs) and not ours.error
    losses = outcome.losses()
    return {
        "program": outcome.program,
        "steps": f"{outcome.steps:,}",
        "eager s": _number(outcome, "eager", "total_s"),
        "torpor s": "> " * outcome.stopped + _number(outcome, "torpor", "total_s"),
        "torpor ×": _ratio(outcome.ratio("torpor", "total_s")),
        "compile s": _number(outcome, "compile", "total_s"),
        "compile ×": _ratio(outcome.ratio("compile", "total_s")),
        "graphs": f"{ours.last.graphs:,}" if ours and ran else "",
        "compiled": f"{ours.last.compiles:,}" if ours and ran else "",
        "MiB": in_mib(ours.memory if ours else None),
        "MiB ×": _ratio(outcome.ratio("torpor", "memory")),
        "losses": str(losses) if losses and ran else "",
    }


def notes(wild: Wild) -> list[str]:
    """Caveats about the tables."""
    said = []
    for outcome in wild.outcomes:
        for row in outcome.rows.values():
            if row.reason:
                said.append(f"{outcome.program}, {row.runner}: not run: {row.reason}")
            if row.error:
                said.append(f"{outcome.program}, {row.runner}: {shortened(row.error)}")
        if outcome.stopped:
            done = outcome.rows["torpor"].last.steps
            said.append(f"{outcome.program}, torpor: stopped at step {done:,} of {outcome.steps:,}")
    return said


def failures(wild: Wild) -> list[str]:
    """The targets that were missed, as text."""
    found = [line for outcome in wild.outcomes for line in _failures(outcome)]
    mean = wild.mean("torpor", "step_ms")
    if mean is not None and mean > MOST_STEP_MEAN:
        found.append(f"geometric mean of steps: {mean:.2f} × eager, at most {MOST_STEP_MEAN}")
    return found


def _failures(outcome: ProgramOutcome) -> list[str]:
    found, slow, losses = [], outcome.slow_steps(), outcome.losses()
    bars = (("step", "step_ms", MOST_STEP), ("total", "total_s", MOST_TOTAL))
    for name, what, most in bars:
        times = outcome.ratio("torpor", what)
        if times is None:
            found.append(f"{outcome.program}: no {name}")
        elif times > most:
            found.append(f"{outcome.program}: {name} {times:.2f} × eager, at most {most}")
    if slow:
        after = f"after the first {GRACE} steps"
        found.append(f"{outcome.program}: {slow} slow steps without a compiled graph {after}")
    if losses and not losses.agree:
        found.append(f"{outcome.program}: losses {losses}")
    return found


def _number(outcome: ProgramOutcome, runner: str, what: str) -> str:
    return number(getattr(outcome.rows.get(runner), what, None), DASH)


def _ratio(value: float | None) -> str:
    return ratio(value, DASH)
