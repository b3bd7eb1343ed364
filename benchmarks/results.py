"""All numbers of one run, and what they were measured on."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from benchmarks.cold import Cold
from benchmarks.imports import Imports
from benchmarks.tracing import Subject


@dataclass
class Results:
    """What was measured; a part that was left out is empty, with a line in `notes` if it failed."""

    subjects: list[Subject] = field(default_factory=list)
    cold: Cold | None = None
    imports: Imports | None = None
    ops: dict[str, Any] | None = None  # as `benchmarks.micro` prints it
    instructions: dict[str, Any] | None = None  # as `benchmarks.micro --instructions` prints it
    recorders: dict[str, Any] | None = None  # as `benchmarks.recorders` prints it
    recorder_instructions: dict[str, Any] | None = None  # the same with `--instructions`
    counter: str = ""  # what counted the instructions
    notes: list[str] = field(default_factory=list)
    repeat: int = 0
    threads: int = 1
    date: str = field(default_factory=lambda: f"{datetime.datetime.now():%Y-%m-%d %H:%M}")
    load: list[float] = field(default_factory=list)  # of the machine, before and after

    def subject(self, system: str, optimizer: str) -> Subject | None:
        """The row of a system, if it was measured."""
        for row in self.subjects:
            if (row.system, row.optimizer) == (system, optimizer):
                return row
        return None

    def as_json(self) -> dict[str, Any]:
        return {
            "date": self.date,
            "machine": machine(),
            "versions": versions(),
            "load": self.load,
            "repeat": self.repeat,
            "threads": self.threads,
            "tracing": [row.as_json() for row in self.subjects],
            "cold": self.cold and self.cold.as_json(),
            "imports": self.imports and self.imports.as_json(),
            "ops": self.ops,
            "instructions": self.instructions,
            "recorders": self.recorders,
            "recorder_instructions": self.recorder_instructions,
            "counter": self.counter,
            "notes": self.notes,
        }


def machine() -> str:
    """The machine in words."""
    cores = os.cpu_count() or 1
    return f"{cores} core{'s' * (cores > 1)}, CPU ({platform.system()}, {platform.machine()})"


def versions() -> str:
    found = [f"{name} {_version(name)}" for name in ("torpor", "torch")]
    return ", ".join([*found, f"Python {platform.python_version()}"])


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "from source"


def load() -> float:
    """How many processes want the machine; 0 where it does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
