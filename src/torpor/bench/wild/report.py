"""What ordinary programs came to, as tables."""

from __future__ import annotations

from torpor.bench.report import Table, described, shortened
from torpor.bench.results import facts
from torpor.bench.wild.loop import GRACE
from torpor.bench.wild.measure import Plan
from torpor.bench.wild.outcome import Outcome, Wild

MOST_STEP = 1.05  # times eager, each program
MOST_STEP_MEAN = 0.95
MOST_TOTAL = 1.2
DASH = "–"


def headline(plan: Plan, wild: Wild) -> str:
    """When, on what, with what."""
    return described(facts("cpu", plan.threads), wild.date, plan.rounds, wild.load)


def step_table(wild: Wild) -> Table:
    """The step after warm-up."""
    columns = [
        "program", "eager ms", "torpor ms", "torpor ×", "CPU ×", "compile ms", "compile ×",
        "slow steps",
    ]  # fmt: skip
    rows = [_step_cells(outcome) for outcome in wild.outcomes]
    ours, theirs = (_ratio(wild.mean(runner, "step_ms")) for runner in ("torpor", "compile"))
    cpu = _ratio(wild.mean("torpor", "step_cpu_ms"))
    return columns, [*rows, ["geometric mean", "", "", ours, cpu, "", theirs, ""]]


def _step_cells(outcome: Outcome) -> list[str]:
    slow = outcome.slow_steps()
    return [
        outcome.program,
        _ms(outcome, "eager"),
        _ms(outcome, "torpor"),
        _ratio(outcome.ratio("torpor", "step_ms")),
        _ratio(outcome.ratio("torpor", "step_cpu_ms")),
        _ms(outcome, "compile"),
        _ratio(outcome.ratio("compile", "step_ms")),
        "" if slow is None else f"{slow:,}",
    ]


def total_table(wild: Wild) -> Table:
    """The whole run."""
    columns = [
        "program", "steps", "eager s", "torpor s", "torpor ×", "compile s", "compile ×",
        "graphs", "compiled", "MiB", "MiB ×", "losses",
    ]  # fmt: skip
    rows = [_total_cells(outcome) for outcome in wild.outcomes]
    means = [_ratio(wild.mean(runner, "total_s")) for runner in ("torpor", "compile")]
    memory = _ratio(wild.mean("torpor", "memory"))
    last = ["geometric mean", "", "", "", means[0], "", means[1], "", "", "", memory, ""]
    return columns, [*rows, last]


def _total_cells(outcome: Outcome) -> list[str]:
    ours = outcome.rows.get("torpor")
    ran = ours is not None and bool(ours.runs) and not ours.error
    memory, losses = ours.memory if ours else None, outcome.losses()
    return [
        outcome.program,
        f"{outcome.steps:,}",
        _seconds(outcome, "eager"),
        ("> " if outcome.stopped else "") + _seconds(outcome, "torpor"),
        _ratio(outcome.ratio("torpor", "total_s")),
        _seconds(outcome, "compile"),
        _ratio(outcome.ratio("compile", "total_s")),
        f"{ours.last.graphs:,}" if ours and ran else "",
        f"{ours.last.compiles:,}" if ours and ran else "",
        f"{memory / 2**20:,.0f}" if memory else "",
        _ratio(outcome.ratio("torpor", "memory")),
        str(losses) if losses and ran else "",
    ]


def notes(wild: Wild) -> list[str]:
    """What a reader of the tables has to know."""
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
    """What is promised and does not hold, in words."""
    found = [line for outcome in wild.outcomes for line in _failures(outcome)]
    mean = wild.mean("torpor", "step_ms")
    if mean is not None and mean > MOST_STEP_MEAN:
        found.append(f"geometric mean of steps: {mean:.2f} × eager, at most {MOST_STEP_MEAN}")
    return found


def _failures(outcome: Outcome) -> list[str]:
    found, slow, losses = [], outcome.slow_steps(), outcome.losses()
    bars = (("step", "step_ms", MOST_STEP), ("total", "total_s", MOST_TOTAL))
    for name, what, most in bars:
        ratio = outcome.ratio("torpor", what)
        if ratio is None:
            found.append(f"{outcome.program}: no {name}")
        elif ratio > most:
            found.append(f"{outcome.program}: {name} {ratio:.2f} × eager, at most {most}")
    if slow:
        after = f"after the first {GRACE} steps"
        found.append(f"{outcome.program}: {slow} slow steps without a compiled graph {after}")
    if losses and not losses.agree:
        found.append(f"{outcome.program}: losses {losses}")
    return found


def _ms(outcome: Outcome, runner: str) -> str:
    found = outcome.rows[runner].step_ms if runner in outcome.rows else None
    if found is None:
        return DASH
    return f"{found:,.1f}" if found >= 10 else f"{found:.2f}"


def _seconds(outcome: Outcome, runner: str) -> str:
    found = outcome.rows[runner].total_s if runner in outcome.rows else None
    return DASH if found is None else f"{found:.1f}"


def _ratio(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"
