"""A script of the user's, run once by each runner, each time in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torpor.bench.processes import command, environment, fresh_folder
from torpor.bench.report import Table, shortened
from torpor.bench.results import facts
from torpor.bench.script_worker import Course

RUNNERS = ("eager", "compile", "torpor")
WARM_STEPS = 20


@dataclass(frozen=True)
class Script:
    """What is run, and how."""

    path: Path
    arguments: tuple[str, ...]
    device: str
    threads: int
    backend: str = "inductor"
    steps: int = 0  # stop after so many; 0: never
    timeout: float = 600.0
    verbose: bool = False
    keep_caches: bool = False


def run(script: Script, runners: list[str], advance: Callable[[str], None]) -> dict[str, Course]:
    """The course of the script with each runner."""
    courses = {}
    for runner in runners:
        courses[runner] = _run_once(script, runner)
        advance(runner)
    return courses


def _run_once(script: Script, runner: str) -> Course:
    with fresh_folder() as folder:
        answer, output = Path(folder) / "answer.json", Path(folder) / "output.txt"
        settings = {
            "answer": str(answer),
            "runner": runner,
            "backend": script.backend,
            "steps": script.steps,
        }
        run = command("torpor.bench.script_worker", with_torpor=runner == "torpor")
        run += [json.dumps(settings), str(script.path), *script.arguments]
        caches = "" if script.keep_caches else folder
        variables = environment(script.threads, script.device, caches)
        error = _await(run, variables, output, script)
        if not answer.exists():
            return Course(error=error or _last_line(output))
        return Course(**json.loads(answer.read_text()))


def _await(run: list[str], variables: dict[str, str], output: Path, script: Script) -> str:
    """Run a process to its end; returns what kept it from ending by itself."""
    with output.open("w") as hidden:
        stream: Any = sys.stderr.fileno() if script.verbose else hidden
        try:
            subprocess.run(run, env=variables, stdout=stream, stderr=stream, timeout=script.timeout)
        except subprocess.TimeoutExpired:
            return f"not done within {script.timeout:g} s"
    return ""


def _last_line(output: Path) -> str:
    lines = [line.strip() for line in output.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"


def step_ms(course: Course) -> float | None:
    """The median step of the later half: the earlier one is for warming up."""
    groups = course.group_ms
    later = groups[(len(groups) + 1) // 2 :] or groups
    return median(later) if later else None


def table(courses: dict[str, Course]) -> Table:
    """A row for each runner."""
    columns = ["runner", "step ms", "/eager", "first step s", "total s", "steps", "MiB", "note"]
    eager = step_ms(courses["eager"]) if "eager" in courses else None
    return columns, [_cells(runner, course, eager) for runner, course in courses.items()]


def _cells(runner: str, course: Course, eager: float | None) -> list[str]:
    ms = step_ms(course)
    return [
        runner,
        "" if ms is None else f"{ms:,.2f}",
        "" if ms is None or eager is None else f"{ms / eager:.2f}",
        f"{course.first_s:.2f}" if course.steps else "",
        f"{course.total_s:.2f}" if course.total_s else "",
        str(course.steps) if course.steps else "",
        f"{course.memory / 2**20:,.0f}" if course.memory else "",
        _note(course),
    ]


def _note(course: Course) -> str:
    if course.error:
        return shortened(course.error)
    if not course.steps:
        return "no step: no optimizer stepped, no module was called without gradients"
    return "" if course.steps >= WARM_STEPS else f"fewer than {WARM_STEPS} steps: may not be warm"


def as_json(script: Script, courses: dict[str, Course]) -> dict[str, Any]:
    """All of it."""
    return {
        **facts(script.device, script.threads),
        "script": str(script.path),
        "arguments": list(script.arguments),
        "runners": {
            runner: {**vars(course), "step_ms": step_ms(course)}
            for runner, course in courses.items()
        },
    }
