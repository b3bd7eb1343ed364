"""Runs one runner with one workload in a process of its own, on request.

The parent writes JSON objects to standard input, one per line, and reads one answer for each.
Several workers take turns; an idle one blocks on its input and uses no CPU.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from torpor.bench import runners
from torpor.bench.runners import Runner, Spec
from torpor.bench.workloads import SCALES, BenchProgram, Workload

MOST_STEPS = 1000  # per round
QUIET_STEPS = 3  # steps without a compile after which it is warm
CALIBRATIONS = 10  # at most


@dataclass(frozen=True)
class WarmUpLimits:
    """Limits on the length of a warm-up, and the target length of a round."""

    least_steps: int = 10
    most_steps: int = 60
    seconds: float = 120.0
    round_ms: float = 100.0


@dataclass
class WarmUp:
    """The first steps of a process."""

    build_s: float
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    cold_s: float = 0.0  # all steps up to the last that compiled
    cpu_s: float = 0.0  # the same as CPU time, with all threads and ended child processes
    compile_s: float = 0.0  # excess time of compiling steps over a warm one
    compiles: int = 0
    settled: bool = False
    steps_per_round: int = 1


@dataclass(frozen=True)
class Round:
    """Back-to-back steps, then a single one that starts with empty queues."""

    ms: float  # per step
    recording_ms: float  # of the single step, until it returned; excluding runs
    single_ms: float  # the same, until it was computed
    faults: float  # minor page faults per step


class Racer:
    """A program and its runner."""

    def __init__(self, spec: Spec, workload: Workload) -> None:
        start = time.perf_counter()
        self.device = spec.device
        self.runner: Runner = runners.make(spec)
        self.program: BenchProgram = workload.build(self.runner.place, spec.device)
        self.program.function = self.runner.prepare(self.program.function)
        self.cuts = not (self.runner.cuts_by_itself and self.program.ends_step)
        self.finish()
        self.warm = WarmUp(time.perf_counter() - start)

    def step(self) -> None:
        """One step, recorded or computed."""
        self.program.step()
        self._end_step()

    def _end_step(self) -> None:
        if self.cuts:
            self.runner.cut()

    def finish(self) -> None:
        """Wait until everything is computed."""
        self.runner.wait()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def warm_up(self, limits: WarmUpLimits) -> WarmUp:
        """Step until nothing compiles any more, or a limit is reached."""
        warm, start, quiet = self.warm, time.perf_counter(), 0
        last_compile, compiling = 1, []
        while True:
            before, compiles = self.runner.unsettled(), self.runner.compiles()
            warm.step_s.append(self._timed_step())
            if self.runner.compiles() > compiles:
                compiling.append(warm.step_s[-1])
                warm.cpu_s = cpu_seconds()
            warm.losses.append(self._loss())
            quiet = quiet + 1 if self.runner.unsettled() == before else 0
            last_compile = last_compile if quiet else len(warm.step_s)
            spent = time.perf_counter() - start
            if quiet >= QUIET_STEPS and len(warm.step_s) >= limits.least_steps:
                break
            if len(warm.step_s) >= limits.most_steps or spent > limits.seconds:
                break
        warm.cold_s = sum(warm.step_s[:last_compile])
        warm.compile_s = sum(compiling) - len(compiling) * warm.step_s[-1]
        warm.settled = quiet >= min(QUIET_STEPS, len(warm.step_s) - 1)
        warm.steps_per_round = self._calibrate(limits.round_ms)
        warm.compiles = self.runner.compiles()
        reset_peak(self.device)
        return warm

    def _timed_step(self) -> float:
        start = time.perf_counter()
        self.step()
        self.finish()
        return time.perf_counter() - start

    def _loss(self) -> float:
        result = self.program.result
        assert result is not None, "a step leaves its result"
        return float(self.runner.read(result).float().mean())

    def _calibrate(self, round_ms: float) -> int:
        """How many steps fill a round; also warms up steps with no read in between."""
        steps = 1
        for _ in range(CALIBRATIONS):
            before = self.runner.unsettled()
            ms = self._back_to_back(max(steps, 2)) * 1e3 / max(steps, 2)
            enough = min(MOST_STEPS, math.ceil(round_ms / ms))
            if enough <= steps and self.runner.unsettled() == before:
                break
            steps = max(steps, enough)
        return steps

    def _back_to_back(self, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        return time.perf_counter() - start

    def round(self) -> Round:
        """One turn in the race."""
        gc.collect()
        steps, faults = self.warm.steps_per_round, page_faults()
        ms = self._back_to_back(steps) * 1e3 / steps
        faults = page_faults() - faults
        waited, start = self.runner.waited(), time.perf_counter()
        self.program.step()
        returned = time.perf_counter()
        recording = returned - start - (self.runner.waited() - waited)
        self._end_step()
        self.finish()
        single = recording * 1e3, (time.perf_counter() - start) * 1e3
        return Round(ms, *single, faults / steps)

    def summary(self) -> dict[str, Any]:
        """The final measurements."""
        reserved = torch.cuda.max_memory_reserved() if self.device == "cuda" else 0
        return {
            "memory": peak(self.device) + self.runner.memory(),
            "reserved": reserved,
            "compiles": self.runner.compiles() - self.warm.compiles,
        }


PEAK_RESET = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def reset_peak(device: str) -> None:
    """Reset the peak memory, if the system can."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif os.access(PEAK_RESET, os.W_OK):
        PEAK_RESET.write_text("5")


def cpu_seconds() -> float:
    """CPU seconds so far of this process and its ended children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


def page_faults() -> int:
    """Page faults so far; caused by memory returned to the system and allocated again."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak(device: str) -> int:
    """Peak bytes since `reset_peak`: allocated on a GPU, resident on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if STATUS.exists():
        lines = STATUS.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def one_line(error: BaseException) -> str:
    """An error as one line."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def private_output() -> TextIO:
    """Reserve standard output for answers; other output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(commands: dict[str, Callable[..., Any]], answers: TextIO) -> None:
    """Answer each line of standard input; an error is answered too, and ends the worker."""
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"answer": commands[question.pop("do")](**question)}
        except Exception as error:
            answer = {"error": one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)
        if "error" in answer:
            return


class Session:
    """The commands of a worker."""

    def __init__(self) -> None:
        self.racer: Racer | None = None

    def build(self, spec: dict[str, Any], workload: str, scale: str, layers: int = 0) -> None:
        options = tuple((name, value) for name, value in spec.pop("options", ()))
        program: Any = SCALES[scale][workload]
        if layers:
            program = replace(program, layers=layers)
        self.racer = Racer(Spec(**spec, options=options), program)

    def warm_up(self, **limits: Any) -> dict[str, Any]:
        assert self.racer is not None, "build comes first"
        return asdict(self.racer.warm_up(WarmUpLimits(**limits)))

    def round(self) -> dict[str, Any]:
        assert self.racer is not None, "build comes first"
        return asdict(self.racer.round())

    def summary(self) -> dict[str, Any]:
        assert self.racer is not None, "build comes first"
        return self.racer.summary()


def main() -> None:
    """Run the worker."""
    answers = private_output()
    session = Session()
    names = ("build", "warm_up", "round", "summary")
    serve({name: getattr(session, name) for name in names}, answers)


if __name__ == "__main__":
    main()
