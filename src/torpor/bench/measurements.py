"""All measurements of one race, and the conditions under which they were made."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

import torpor

OFF = 1e-2  # relative loss difference from eager above which a note is shown
TRACING_BOUND = 0.9  # fraction of a step spent recording
COMPILED = ("compile", "compile-reduce-overhead")


@dataclass
class Row:
    """One runner with one workload."""

    runner: str  # display name
    records: bool = False
    samples: list[float] = field(default_factory=list)  # ms per step, one per round
    recording: list[float] = field(default_factory=list)  # ms until a single step returned
    single: list[float] = field(default_factory=list)  # ms until it was computed
    faults: list[float] = field(default_factory=list)  # page faults per step, one per round
    losses: list[float] = field(default_factory=list)  # during the warm-up
    steps_per_round: int = 0
    memory: int = 0  # peak bytes since the warm-up
    reserved: int = 0  # bytes reserved on the GPU
    first_s: float = 0.0
    cold_s: float = 0.0
    compiles: int = 0  # during the warm-up
    late_compiles: int = 0  # later
    settled: bool = True
    error: str = ""

    @property
    def ms(self) -> float | None:
        return median(self.samples) if self.samples else None

    @property
    def spread(self) -> float:
        """Half the interquartile range, relative to the median."""
        ordered, middle = sorted(self.samples), self.ms
        if middle is None:
            return 0.0
        last = len(ordered) - 1
        return (ordered[last * 3 // 4] - ordered[last // 4]) / 2 / middle

    @property
    def recording_ms(self) -> float | None:
        return median(self.recording) if self.recording else None

    @property
    def tracing_bound(self) -> bool:
        """Whether recording a step takes as long as the step."""
        if not self.records or self.ms is None or self.recording_ms is None:
            return False
        return self.recording_ms >= TRACING_BOUND * self.ms


@dataclass
class WorkloadOutcome:
    """One workload, with all its runners."""

    workload: str
    title: str
    rows: list[Row] = field(default_factory=list)

    def row(self, runner: str) -> Row | None:
        return next((row for row in self.rows if row.runner == runner), None)

    def ratio(self, row: Row, *others: str) -> float | None:
        """The time of `row`, as a multiple of the fastest of `others`."""
        times = [found.ms for name in others if (found := self.row(name)) and found.ms is not None]
        return None if row.ms is None or not times else row.ms / min(times)

    def loss_difference(self, row: Row) -> float | None:
        """Relative (absolute if below 1) difference to eager's loss, at the last common step."""
        eager = self.row("eager")
        if eager is None or not eager.losses or not row.losses:
            return None
        last = min(len(eager.losses), len(row.losses)) - 1
        expected = eager.losses[last]
        difference = abs(row.losses[last] - expected) / max(1.0, abs(expected))
        return difference if difference == difference else float("inf")

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "title": self.title,
            "rows": [self._row_as_json(row) for row in self.rows],
        }

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        return {
            "runner": row.runner,
            "ms": row.ms,
            "spread": row.spread,
            "to_eager": self.ratio(row, "eager"),
            "to_compile": self.ratio(row, "compile"),
            "to_best_compile": self.ratio(row, *COMPILED),
            "recording_ms": row.recording_ms,
            "single_ms": median(row.single) if row.single else None,
            "page_faults": median(row.faults) if row.faults else None,
            "tracing_bound": row.tracing_bound,
            "memory_bytes": row.memory,
            "reserved_bytes": row.reserved,
            "first_s": row.first_s,
            "cold_s": row.cold_s,
            "compiles": row.compiles,
            "late_compiles": row.late_compiles,
            "settled": row.settled,
            "loss": row.losses[-1] if row.losses else None,
            "loss_difference": self.loss_difference(row),
            "steps_per_round": row.steps_per_round,
            "samples": row.samples,
            "error": row.error,
        }


@dataclass
class Results:
    """All results of one run."""

    device: str
    threads: int
    rounds: int
    scale: str = "full"
    outcomes: list[WorkloadOutcome] = field(default_factory=list)
    date: str = field(default_factory=lambda: now())
    load: list[float] = field(default_factory=list)  # load average, before and after

    def as_json(self) -> dict[str, Any]:
        return {
            **facts(self.device, self.threads),
            "date": self.date,
            "rounds": self.rounds,
            "scale": self.scale,
            "load": self.load,
            "workloads": [outcome.as_json() for outcome in self.outcomes],
        }


def now() -> str:
    """The current date and time."""
    return f"{datetime.datetime.now():%Y-%m-%d %H:%M}"


def facts(device: str, threads: int) -> dict[str, Any]:
    """The conditions of a run."""
    return {
        "machine": machine(device),
        "versions": {
            "torpor": torpor.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": device,
        "threads": threads,
        "environment": {name: os.environ[name] for name in sorted(os.environ) if _matters(name)},
    }


def _matters(name: str) -> bool:
    """Whether an environment variable affects threads' waiting, memory allocation, or torpor."""
    return name.startswith(("OMP_", "GOMP_", "MALLOC_", "TORPOR_"))


def machine(device: str) -> str:
    """A description of the machine."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cores = os.cpu_count() or 1
    return f"{cores} core{'s' * (cores > 1)}, CPU ({platform.system()}, {platform.machine()})"


def load() -> float:
    """The machine's load average; 0 if unknown."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0
