"""How long recording a training step takes, next to eager's whole step and to `torch._lazy`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.clock import Time, medians
from benchmarks.worker import Step, Worker

WARM_UP = 4  # the first step makes the optimizer's state, the second and third promote numbers
SLOW = 1.0  # seconds; a step that takes longer has its turn in every fifth round only
SLOW_EVERY = 5


@dataclass
class Subject:
    """One row: a system, an optimizer, and the steps it ran."""

    system: str
    optimizer: str
    steps: list[Step] = field(default_factory=list)
    first: Step | None = None
    fallbacks: int = 0
    recorded: int = 0
    every: int = 1
    error: str = ""

    @property
    def trace(self) -> Time:
        return medians([step.trace for step in self.steps])

    @property
    def cut(self) -> Time:
        return medians([step.cut for step in self.steps])

    def as_json(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "optimizer": self.optimizer,
            "trace": self.trace._asdict() if self.steps else None,
            "cut": self.cut._asdict() if self.steps else None,
            "first": self.first.trace._asdict() if self.first else None,
            "recorded": self.recorded,
            "fallbacks": self.fallbacks,
            "error": self.error,
            "steps": [[*step.trace, *step.cut] for step in self.steps],
        }


def subjects() -> list[Subject]:
    """What is measured, in the order of its turns."""
    names = ("eager", "torpor", "torpor-concrete", "torch-lazy")
    return [Subject(name, optimizer) for optimizer in ("adamw", "sgd") for name in names]


def measure(
    repeat: int, threads: int, size: dict[str, Any], advance: Callable[[str], None]
) -> list[Subject]:
    """Warm each subject up, then let them take turns `repeat` times."""
    rows = subjects()
    with ExitStack() as stack:
        workers = []
        for row in rows:
            workers.append(stack.enter_context(Worker(row.system, row.optimizer, threads, **size)))
            _warm_up(row, workers[-1])
            advance(f"warmed up {row.system}, {row.optimizer}")
        for turn in range(repeat):
            for row, worker in zip(rows, workers):
                if not row.error and turn % row.every == 0:
                    row.steps.append(worker.step() if row.every > 1 else worker.second_step())
            advance(f"round {turn + 1} of {repeat}")
        for row, worker in zip(rows, workers):
            _count(row, worker)
    return rows


def turns(repeat: int) -> int:
    """How often `measure` calls `advance`."""
    return len(subjects()) + repeat


def _warm_up(row: Subject, worker: Worker) -> None:
    try:
        row.first = worker.step()
        step = worker.step()
        if step.trace.cpu > SLOW:
            row.every = SLOW_EVERY
            return
        for _ in range(WARM_UP - 2):
            worker.step()
    except RuntimeError as error:  # one system that breaks must not take the table with it
        row.error = str(error)


def _count(row: Subject, worker: Worker) -> None:
    if row.error:
        return
    counters = worker.counters()
    row.fallbacks = sum(n for name, n in counters.items() if name.startswith("aten::"))
    row.recorded = sum(n for name, n in counters.items() if name.startswith("lazy::"))
