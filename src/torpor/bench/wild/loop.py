"""The interface from a program to the benchmark: its losses, and where its steps end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROUPS = 40  # of steps per run; each ends with a wait for the device
GRACE = 50  # steps that may be slow without a compiled graph; a group ends there
STATM = Path("/proc/self/statm")
PAGE = 4096


class LoopEnded(BaseException):
    """The last step has ended; not an `Exception`, so that programs do not catch it."""


@dataclass(frozen=True)
class Mark:
    """The state of a run at the end of a group of steps."""

    steps: int
    seconds: float  # since the start of the run
    resumed: float  # the same, after making the mark
    cpu_s: float  # of all threads of the process
    resident: int  # bytes
    compiled: int  # runs of compiled graphs so far


def _same(module: Any) -> Any:
    return module


def _nothing() -> int:
    return 0


@dataclass
class Loop:
    """One run of a program."""

    steps: int
    folder: Path = field(default_factory=Path)  # for the program's files
    compile: Callable[[Any], Any] = _same  # torch.compile, for that runner
    finish: Callable[[], object] = _nothing  # waits until everything is computed
    compiled_runs: Callable[[], int] = _nothing  # number of runs of compiled graphs so far
    most_s: float = 0.0  # time limit in seconds; 0: none
    start: float = field(default_factory=time.perf_counter)
    done: int = 0
    marks: list[Mark] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)  # step, value

    @property
    def group(self) -> int:
        return max(1, self.steps // GROUPS)

    def log(self, loss: float) -> None:
        """Called when the program has read a loss for its log."""
        self.losses.append((self.done, loss))

    def step(self) -> None:
        """Called at the end of a step; raises `LoopEnded` after the last one."""
        self.done += 1
        if self.done % self.group and self.done not in (GRACE, self.steps):
            return
        self.finish()
        now, cpu_s = self._now(), time.process_time()
        compiled = self.compiled_runs()
        self.marks.append(Mark(self.done, now, self._now(), cpu_s, resident(), compiled))
        if self.done >= self.steps or 0 < self.most_s < now:
            raise LoopEnded

    def _now(self) -> float:
        return time.perf_counter() - self.start


def resident() -> int:
    """Resident bytes of this process; 0 if unknown."""
    return int(STATM.read_text().split()[1]) * PAGE if STATM.exists() else 0
