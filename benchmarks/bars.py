"""The promises that a run is held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import cold, imports
from benchmarks.clock import Time
from benchmarks.results import Results
from benchmarks.tracing import Subject

OF_EAGER = 1.0
OF_TORCH_LAZY = 1 / 3
OF_FLOOR = 1.3
BINARY = "add.Tensor"
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
TORPOR = {"torpor": "lazy device", "torpor-concrete": "concrete-lazy"}


@dataclass(frozen=True)
class Bar:
    """A number and what it may be at most. CPU time decides: it holds on a busy machine."""

    name: str
    measured: Time
    limit: float
    unit: str = "×"

    @property
    def passed(self) -> bool:
        return self.measured.cpu <= self.limit

    @property
    def verdict(self) -> str:
        """Says so where the wall clock sees it otherwise."""
        wall = self.measured.wall <= self.limit
        words = {True: "pass", False: "FAIL"}
        return words[self.passed] + ("" if wall == self.passed else f" (wall: {words[wall]})")

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def bars(results: Results) -> list[Bar]:
    """Every bar that this run has numbers for."""
    found = list(_tracing(results))
    if results.cold:
        name = f"cold: {cold.MANY} layers / ({cold.FEW} cold + {cold.MANY - cold.FEW} warm)"
        found.append(Bar(name, results.cold.ratio, cold.BAR))
    if results.recorders:
        found += _recorders(results.recorders["ops"])
    if results.imports:
        found.append(Bar("import torpor, after torch", results.imports.added, imports.BAR, "s"))
    return found


def _tracing(results: Results) -> Iterator[Bar]:
    for optimizer, title in OPTIMIZERS.items():
        for system, where in TORPOR.items():
            mine = results.subject(system, optimizer)
            name = f"tracing, {where}, {title} / "
            if whole := ratio(mine, results.subject("eager", optimizer)):
                yield Bar(name + "eager's step", whole, OF_EAGER)
            if traced := ratio(mine, results.subject("torch-lazy", optimizer)):
                yield Bar(name + "torch._lazy's", traced, OF_TORCH_LAZY)


def _recorders(rows: list[dict[str, Any]]) -> Iterator[Bar]:
    for row in rows:
        if row["op"] == BINARY:
            name = f"dispatch of {BINARY} / floor"
            yield Bar(name, _over(Time(*row["torpor"]), Time(*row["floor"])), OF_FLOOR)


def total(rows: list[dict[str, Any]], way: str) -> Time:
    """Nanoseconds of all calls of the suite, recorded in one way."""
    wall, cpu = (sum(row[way][clock] * row["calls"] for row in rows) for clock in (0, 1))
    return Time(wall, cpu)


def _over(mine: Time, other: Time) -> Time:
    return Time(mine.wall / other.wall, mine.cpu / other.cpu)


def ratio(mine: Subject | None, other: Subject | None) -> Time | None:
    """Median over median, on each clock."""
    if mine is None or other is None or not mine.steps or not other.steps:
        return None
    return _over(mine.trace, other.trace)
