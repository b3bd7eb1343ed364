"""Starts the processes of `torpor bench --wild`, one after the other."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor.bench.measurements import facts, load
from torpor.bench.wild.loop import Mark
from torpor.bench.wild.outcome import ProgramOutcome, ProgramRow, ProgramRun, Wild
from torpor.bench.wild.programs import WildProgram
from torpor.bench.worker_processes import command, environment, fresh_folder, run_to_end
from torpor.native.build import folder as native_folder

RUNNERS = ("eager", "torpor", "compile")
PATIENCE = 5.0  # times eager: slower runs are stopped at the end of a step
LEAST_S = 120.0  # but not before; a slow machine may compile for a minute


@dataclass(frozen=True)
class WildPlan:
    """What to run, and how."""

    programs: tuple[WildProgram, ...]
    runners: tuple[str, ...] = RUNNERS
    threads: int = 1
    rounds: int = 1
    steps: int = 0  # 0: each program's default
    keep_caches: bool = False
    timeout: float = 600.0

    @property
    def turns(self) -> int:
        return len(self.programs) * len(self.runners) * self.rounds

    def steps_of(self, program: WildProgram) -> int:
        return self.steps or program.steps


def measure(plan: WildPlan, advance: Callable[[str], None], note: Callable[[Wild], None]) -> Wild:
    """Every program with every runner; the rounds of a program run consecutively."""
    wild = Wild(load=[load()])
    for program in plan.programs:
        rows = {name: ProgramRow(name) for name in plan.runners}
        outcome = ProgramOutcome(
            program.name, program.title, plan.steps_of(program), rows, program.window
        )
        for _ in range(plan.rounds):
            for runner in plan.runners:
                _take_turn(plan, program, outcome, runner)
                advance(f"{program.name}: {runner}")
        wild.outcomes.append(outcome)
        wild.load = [wild.load[0], load()]
        note(wild)
    return wild


def _take_turn(plan: WildPlan, program: WildProgram, outcome: ProgramOutcome, runner: str) -> None:
    row = outcome.rows[runner]
    if runner == "compile" and program.uncompiled:
        row.reason = program.uncompiled
        return
    eager = outcome.rows["eager"].total_s if "eager" in outcome.rows else None
    most_s = max(LEAST_S, PATIENCE * eager) if eager and runner != "eager" else 0.0
    row.runs.append(_run(plan, program, runner, min(most_s or plan.timeout, plan.timeout)))


def _run(plan: WildPlan, program: WildProgram, runner: str, most_s: float) -> ProgramRun:
    with fresh_folder() as folder:
        settings = {
            "runner": runner, "program": program.name, "steps": plan.steps_of(program),
            "folder": folder, "most_s": most_s,
        }  # fmt: skip
        variables = environment(plan.threads, "cpu")
        if not plan.keep_caches:
            variables |= fresh_caches(Path(folder))
        module = command("torpor.bench.wild.worker", with_torpor=False)
        longest = most_s + plan.timeout  # a single compile may take long
        found = run_to_end(module, settings, [], variables, Path(folder), longest)
        ended = time.perf_counter()
    if isinstance(found, str):
        return ProgramRun(error=found)
    found["marks"] = [Mark(**mark) for mark in found["marks"]]
    found["losses"] = [(step, loss) for step, loss in found["losses"]]
    start, planned = found.pop("start"), plan.steps_of(program)
    return ProgramRun(total_s=ended - start, planned=planned, **found)


def fresh_caches(folder: Path) -> dict[str, str]:
    """Environment for empty compiler caches, except for the native library, which is shared."""
    ours = folder / "torpor"
    ours.mkdir(mode=0o700)
    with contextlib.suppress(OSError):
        native_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        os.symlink(native_folder(), ours / "native")
    return {
        "TORPOR_CACHE_DIR": str(ours),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def as_json(plan: WildPlan, wild: Wild) -> dict[str, Any]:
    """All data as JSON."""
    return {
        **facts("cpu", plan.threads),
        "rounds": plan.rounds,
        "keep_caches": plan.keep_caches,
        **wild.as_json(),
    }
