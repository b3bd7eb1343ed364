"""Measures a user's script with each runner, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torpor.bench.measurements import facts
from torpor.bench.report import Table, in_mib, shortened, tabled
from torpor.bench.script_worker import Course
from torpor.bench.worker_processes import command, environment, fresh_folder, run_to_end

RUNNERS = ("eager", "compile", "torpor")
WARM_STEPS = 20


@dataclass(frozen=True)
class Script:
    """What to run, and how."""

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
    settings = {"runner": runner, "backend": script.backend, "steps": script.steps}
    module = command("torpor.bench.script_worker", with_torpor=runner == "torpor")
    arguments = [str(script.path), *script.arguments]
    with fresh_folder() as folder:
        caches = "" if script.keep_caches else folder
        variables = environment(script.threads, script.device, caches)
        found = run_to_end(
            module, settings, arguments, variables, Path(folder), script.timeout, script.verbose
        )
    return Course(error=found) if isinstance(found, str) else Course(**found)


def step_ms(course: Course) -> float | None:
    """The median step of the second half; the first half is warm-up."""
    groups = course.group_ms
    later = groups[(len(groups) + 1) // 2 :] or groups
    return median(later) if later else None


def table(courses: dict[str, Course]) -> Table:
    """A row per runner."""
    eager = step_ms(courses["eager"]) if "eager" in courses else None
    return tabled(_cells(runner, course, eager) for runner, course in courses.items())


def _cells(runner: str, course: Course, eager: float | None) -> dict[str, str]:
    ms = step_ms(course)
    return {
        "runner": runner,
        "step ms": "" if ms is None else f"{ms:,.2f}",
        "/eager": "" if ms is None or eager is None else f"{ms / eager:.2f}",
        "first step s": f"{course.first_s:.2f}" if course.steps else "",
        "total s": f"{course.total_s:.2f}" if course.total_s else "",
        "steps": str(course.steps) if course.steps else "",
        "MiB": in_mib(course.memory),
        "note": _note(course),
    }


def _note(course: Course) -> str:
    if course.error:
        return shortened(course.error)
    if not course.steps:
        return "no step: no optimizer stepped, no module was called without gradients"
    return "" if course.steps >= WARM_STEPS else f"fewer than {WARM_STEPS} steps: may not be warm"


def as_json(script: Script, courses: dict[str, Course]) -> dict[str, Any]:
    """All data as JSON."""
    return {
        **facts(script.device, script.threads),
        "script": str(script.path),
        "arguments": list(script.arguments),
        "runners": {
            runner: {**vars(course), "step_ms": step_ms(course)}
            for runner, course in courses.items()
        },
    }
