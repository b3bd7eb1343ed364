"""Starts the processes of `torpor bench --wild`, one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor.bench.processes import command, environment, fresh_folder
from torpor.bench.results import facts, load
from torpor.bench.wild.loop import Mark
from torpor.bench.wild.outcome import Outcome, Row, Run, Wild
from torpor.bench.wild.programs import Program
from torpor.native.build import folder as native_folder

RUNNERS = ("eager", "torpor", "compile")
PATIENCE = 5.0  # times eager: a run that takes longer is stopped at the end of a step
LEAST_S = 120.0  # before that; a slow machine compiles for a minute


@dataclass(frozen=True)
class Plan:
    """What is run, and how."""

    programs: tuple[Program, ...]
    runners: tuple[str, ...] = RUNNERS
    threads: int = 1
    rounds: int = 1
    steps: int = 0  # 0: as many as each program has
    keep_caches: bool = False
    timeout: float = 600.0

    @property
    def turns(self) -> int:
        return len(self.programs) * len(self.runners) * self.rounds

    def steps_of(self, program: Program) -> int:
        return self.steps or program.steps


def measure(plan: Plan, advance: Callable[[str], None], note: Callable[[Wild], None]) -> Wild:
    """Every program with every runner; rounds of one program stand side by side."""
    wild = Wild(load=[load()])
    for program in plan.programs:
        rows = {name: Row(name) for name in plan.runners}
        outcome = Outcome(program.name, program.title, plan.steps_of(program), rows, program.window)
        for _ in range(plan.rounds):
            for runner in plan.runners:
                _take_turn(plan, program, outcome, runner)
                advance(f"{program.name}: {runner}")
        wild.outcomes.append(outcome)
        wild.load = [wild.load[0], load()]
        note(wild)
    return wild


def _take_turn(plan: Plan, program: Program, outcome: Outcome, runner: str) -> None:
    row = outcome.rows[runner]
    if runner == "compile" and program.uncompiled:
        row.reason = program.uncompiled
        return
    eager = outcome.rows["eager"].total_s if "eager" in outcome.rows else None
    most_s = max(LEAST_S, PATIENCE * eager) if eager and runner != "eager" else 0.0
    row.runs.append(_run(plan, program, runner, min(most_s or plan.timeout, plan.timeout)))


def _run(plan: Plan, program: Program, runner: str, most_s: float) -> Run:
    with fresh_folder() as folder:
        answer, said = Path(folder) / "answer.json", Path(folder) / "said.txt"
        settings = {
            "runner": runner, "program": program.name, "steps": plan.steps_of(program),
            "folder": folder, "most_s": most_s, "answer": str(answer),
        }  # fmt: skip
        run = [*command("torpor.bench.wild.worker", with_torpor=False), json.dumps(settings)]
        variables = environment(plan.threads, "cpu")
        if not plan.keep_caches:
            variables |= fresh_caches(Path(folder))
        late = _await(run, variables, said, most_s + plan.timeout)  # one compile may be long
        ended = time.perf_counter()
        if not answer.exists():
            return Run(error=late or _last_line(said))
        found = json.loads(answer.read_text())
    found["marks"] = [Mark(**mark) for mark in found["marks"]]
    found["losses"] = [(step, loss) for step, loss in found["losses"]]
    start, planned = found.pop("start"), plan.steps_of(program)
    return Run(total_s=ended - start, planned=planned, **found)


def fresh_caches(folder: Path) -> dict[str, str]:
    """Nothing compiled before is found; the native library is, which is built once and for all."""
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


def _await(run: list[str], variables: dict[str, str], said: Path, timeout: float) -> str:
    with said.open("w") as stream:
        try:
            subprocess.run(run, env=variables, stdout=stream, stderr=stream, timeout=timeout)
        except subprocess.TimeoutExpired:
            return f"not done within {timeout:.0f} s"
    return ""


def _last_line(said: Path) -> str:
    lines = [line.strip() for line in said.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"


def as_json(plan: Plan, wild: Wild) -> dict[str, Any]:
    """All of it."""
    return {
        **facts("cpu", plan.threads),
        "rounds": plan.rounds,
        "keep_caches": plan.keep_caches,
        **wild.as_json(),
    }
