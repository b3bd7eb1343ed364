"""The measurements of `torpor bench --wild`, and their targets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from torpor.backends.equality import TOLERANCES
from torpor.bench.measurements import now
from torpor.bench.wild.loop import GRACE, Mark

GROWTH = 10.0  # how much a rounding error may grow within some steps
SLOW = 1.1  # times eager


@dataclass
class ProgramRun:
    """One process: a program with one runner, once."""

    marks: list[Mark] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    planned: int = 0  # steps; a run stopped in the first half was never warm
    total_s: float = 0.0  # from the end of `import torch` to process exit
    memory: int = 0
    compiles: int = 0
    graphs: int = 0
    error: str = ""

    def groups(self) -> list[tuple[Mark, Mark]]:
        """The marks before and after each group of steps except the first."""
        return list(zip(self.marks, self.marks[1:]))

    def ms(self) -> list[float]:
        """Milliseconds per step, for each group."""
        return [(b.seconds - a.resumed) * 1e3 / (b.steps - a.steps) for a, b in self.groups()]

    @property
    def step_ms(self) -> float | None:
        """The median of the second half."""
        found = self.ms() if 2 * self.steps >= self.planned else []
        return median(found[len(found) // 2 :]) if found else None

    @property
    def step_cpu_ms(self) -> float | None:
        """CPU time per step in the second half: less affected by a busy machine."""
        if len(self.marks) < 2 or 2 * self.steps < self.planned:
            return None
        a, b = self.marks[(len(self.marks) - 1) // 2], self.marks[-1]
        return (b.cpu_s - a.cpu_s) * 1e3 / (b.steps - a.steps)


@dataclass
class ProgramRow:
    """One program with one runner, in all rounds."""

    runner: str
    runs: list[ProgramRun] = field(default_factory=list)
    reason: str = ""  # why it was not run

    @property
    def error(self) -> str:
        return next((run.error for run in self.runs if run.error), "")

    def middle(self, values: Iterable[float | None]) -> float | None:
        """The median over rounds."""
        found = [value for value in values if value is not None]
        return median(found) if found and not self.error else None

    @property
    def step_ms(self) -> float | None:
        return self.middle(run.step_ms for run in self.runs)

    @property
    def step_cpu_ms(self) -> float | None:
        return self.middle(run.step_cpu_ms for run in self.runs)

    @property
    def total_s(self) -> float | None:
        return self.middle(run.total_s for run in self.runs)

    @property
    def memory(self) -> float | None:
        return self.middle(float(run.memory) for run in self.runs)

    @property
    def last(self) -> ProgramRun:
        return self.runs[-1] if self.runs else ProgramRun()


@dataclass
class ProgramOutcome:
    """One program, with all its runners."""

    program: str
    title: str
    steps: int
    rows: dict[str, ProgramRow] = field(default_factory=dict)
    window: int = 20  # steps after the first difference to compare losses in

    def ratio(self, runner: str, what: str) -> float | None:
        """`step_ms`, `total_s` and so on of a runner, as a multiple of eager's."""
        ours, eager = (self._value(name, what) for name in (runner, "eager"))
        return ours / eager if ours is not None and eager else None

    def _value(self, runner: str, what: str) -> float | None:
        found: float | None = getattr(self.rows[runner], what) if runner in self.rows else None
        return found

    @property
    def stopped(self) -> bool:
        """Whether torpor's run was stopped because it took too long."""
        runs = self.rows["torpor"].runs if "torpor" in self.rows else []
        return any(run.steps < self.steps and not run.error for run in runs)

    def slow_steps(self) -> int | None:
        """How many steps of torpor, after the first ones, were slow and uncompiled.

        A group is slow if it took over 1.1 times as long as the median of eager's, and as the same
        group of eager's.
        """
        if not {"eager", "torpor"} <= set(self.rows):
            return None
        eager, ours = self.rows["eager"].last, self.rows["torpor"].last
        usual = eager.step_ms
        if usual is None or not ours.marks:
            return None
        theirs = [*eager.ms(), *[usual] * len(ours.marks)]  # eager's may have been stopped
        groups = zip(ours.groups(), ours.ms(), theirs)
        return sum(
            b.steps - a.steps
            for (a, b), ms, same in groups
            if a.steps >= GRACE and _uncompiled(a, b) and ms > SLOW * max(usual, same)
        )

    def losses(self) -> Losses | None:
        """torpor's losses compared with eager's."""
        if not {"eager", "torpor"} <= set(self.rows):
            return None
        eager, ours = self.rows["eager"].last, self.rows["torpor"].last
        return Losses.of(eager.losses, ours.losses, self.window)


def _uncompiled(before: Mark, after: Mark) -> bool:
    """Whether fewer compiled graphs ran than there were steps."""
    return after.compiled - before.compiled < after.steps - before.steps


@dataclass(frozen=True)
class Losses:
    """How much losses differ from eager's."""

    compared: int
    equal: int  # bit for bit
    difference: float  # the largest within the window, relative to eager's
    final: float  # of the means over the last quarter, relative

    @classmethod
    def of(
        cls, eager: list[tuple[int, float]], ours: list[tuple[int, float]], window: int
    ) -> Losses:
        pairs = [(step, a, b) for (step, a), (_, b) in zip(eager, ours)]
        apart = [step for step, a, b in pairs if a != b]
        until = apart[0] + window if apart else 0
        near = [_share(a, b) for step, a, b in pairs if step < until]
        last = pairs[-max(1, len(pairs) // 4) :]
        final = _share(sum(a for _, a, _ in last), sum(b for _, _, b in last))
        return cls(len(pairs), len(pairs) - len(apart), max(near, default=0.0), final)

    @property
    def agree(self) -> bool:
        relative, absolute = TOLERANCES[torch.float32]
        return self.difference <= GROWTH * (relative + absolute)

    def __str__(self) -> str:
        if not self.compared:
            return "none read"
        if self.equal == self.compared:
            return "equal"
        return f"±{self.difference:.0e}" if self.agree else f"off by {self.difference:.0e}"


def _share(expected: float, got: float) -> float:
    found = abs(got - expected) / max(1.0, abs(expected))
    return found if found == found else math.inf


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the values that are present."""
    logs = [math.log(value) for value in values if value]
    return math.exp(sum(logs) / len(logs)) if logs else None


@dataclass
class Wild:
    """All results of one run."""

    outcomes: list[ProgramOutcome] = field(default_factory=list)
    date: str = field(default_factory=now)
    load: list[float] = field(default_factory=list)  # load average, before and after

    def mean(self, runner: str, what: str) -> float | None:
        return geometric_mean(outcome.ratio(runner, what) for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        return {
            "date": self.date,
            "load": self.load,
            "step_mean": {r: self.mean(r, "step_ms") for r in ("torpor", "compile")},
            "total_mean": {r: self.mean(r, "total_s") for r in ("torpor", "compile")},
            "programs": [_outcome_as_json(outcome) for outcome in self.outcomes],
        }


def _outcome_as_json(outcome: ProgramOutcome) -> dict[str, Any]:
    losses = outcome.losses()
    return {
        "program": outcome.program,
        "title": outcome.title,
        "steps": outcome.steps,
        "slow_steps": outcome.slow_steps(),
        "stopped": outcome.stopped,
        "losses": vars(losses) | {"agree": losses.agree} if losses else None,
        "runners": {name: _row_as_json(outcome, row) for name, row in outcome.rows.items()},
    }


def _row_as_json(outcome: ProgramOutcome, row: ProgramRow) -> dict[str, Any]:
    ratios = ("step_ms", "step_cpu_ms", "total_s", "memory")
    return {
        **{what: getattr(row, what) for what in ratios},
        **{f"{what}_to_eager": outcome.ratio(row.runner, what) for what in ratios},
        "compiles": row.last.compiles,
        "graphs": row.last.graphs,
        "steps": row.last.steps,
        "group_ms": [run.ms() for run in row.runs],
        "resident": [mark.resident for mark in row.last.marks],
        "loss": row.last.losses[-1][1] if row.last.losses else None,
        "error": row.error,
        "reason": row.reason,
    }
