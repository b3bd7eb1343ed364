"""Runs a user's script with one runner, in a process of its own, and times its steps.

A step ends at each step of the optimizer that steps first or, in a script without optimizer, at
each outermost module call without gradients.
"""

from __future__ import annotations

import functools
import json
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from torpor._torch import register_step_hook, wrap_module_call
from torpor.bench import bare
from torpor.bench.worker import one_line, peak

GROUP = 5  # steps between waits for the device, to keep it asynchronous


class EnoughSteps(BaseException):
    """Ends the script; not an `Exception`, so that the script does not catch it."""


@dataclass
class Clock:
    """Records when steps end."""

    finish: Callable[[], object]
    most_steps: int = 0  # 0: unlimited
    start: float = field(default_factory=time.perf_counter)
    steps: int = 0
    ends: list[tuple[int, float]] = field(default_factory=list)  # steps so far, seconds so far

    def step(self) -> None:
        """Called at the end of a step."""
        self.steps += 1
        if self.steps == 1 or self.steps % GROUP == 0 or self.steps == self.most_steps:
            self.note()
        if self.steps == self.most_steps:
            raise EnoughSteps

    def note(self) -> None:
        """Wait for all steps so far, and record the time."""
        self.finish()
        if not self.ends or self.ends[-1][0] < self.steps:
            self.ends.append((self.steps, time.perf_counter() - self.start))

    def groups(self) -> list[float]:
        """Milliseconds per step, between recorded times."""
        pairs = zip(self.ends, self.ends[1:])
        return [(after - before) * 1e3 / (b - a) for (a, before), (b, after) in pairs]


class Steps:
    """Notifies the clock of optimizer steps, or of module calls if there is no optimizer."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.optimizer: object = None  # the first that stepped
        self.has_optimizer = False

    @property
    def kind(self) -> str:
        return "training" if self.optimizer is not None else "inference"

    def watch(self) -> None:
        """Install both hooks."""
        register_step_hook(self.after_step)
        wrap_module_call(functools.partial(_around_outermost, self.after_call))
        optimizer_class: Any = torch.optim.Optimizer
        init = optimizer_class.__init__

        @functools.wraps(init)
        def noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.has_optimizer = True
            init(optimizer, *args, **kwargs)

        optimizer_class.__init__ = noted

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.optimizer is None:
            self.optimizer = optimizer
            self.clock.steps, self.clock.ends = 0, []  # discard earlier module calls
        if optimizer is self.optimizer:
            self.clock.step()

    def after_call(self) -> None:
        if not self.has_optimizer and not torch.is_grad_enabled():
            self.clock.step()


def _around_outermost(
    after: Callable[[], None], call: Callable[..., Any], before: Callable[[Any], None] | None = None
) -> Callable[..., Any]:
    """`nn.Module.__call__`, with hooks before and after outermost calls."""
    calls = threading.local()
    is_compiling = torch.compiler.is_compiling

    @functools.wraps(call)
    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or getattr(calls, "inside", False):
            return call(self, *args, **kwargs)
        calls.inside = True
        try:
            if before is not None:
                before(self)
            result = call(self, *args, **kwargs)
        finally:
            calls.inside = False
        after()
        return result

    return __call__


def compile_modules() -> None:
    """Compile each module at its first outermost call."""

    compiled: WeakSet[torch.nn.Module] = WeakSet()

    def compile_once(module: torch.nn.Module) -> None:
        if module not in compiled:
            compiled.add(module)
            module.compile()

    wrap_module_call(lambda call: _around_outermost(_nothing, call, compile_once))


def _nothing() -> None:
    """No-op after a call."""


def prepare(runner: str, backend: str) -> Callable[[], object]:
    """Set up a runner; returns a function that waits for its work."""
    if runner == "torpor":
        import torpor

        torpor.use(backend)
        torpor.enable()
        return _with_device(torpor.wait)
    if runner == "compile":
        compile_modules()
    return _with_device(_nothing)


def _with_device(wait: Callable[[], object]) -> Callable[[], object]:
    def finish() -> None:
        wait()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    return finish


@dataclass
class Course:
    """Measurements of one run of a script."""

    kind: str = ""
    steps: int = 0
    first_s: float = 0.0  # from the start of the script to the end of its first step
    group_ms: list[float] = field(default_factory=list)
    total_s: float = 0.0
    memory: int = 0
    error: str = ""


def run_script(path: str, runner: str, backend: str, steps: int) -> Course:
    """Run the script as `python path` would."""
    clock = Clock(prepare(runner, backend), steps)
    watched = Steps(clock)
    watched.watch()
    sys.path.insert(0, str(Path(path).resolve().parent))
    if runner != "torpor":
        bare.forget()  # a script may import the real torpor
    clock.start = time.perf_counter()
    error = _run(path, clock)
    total = time.perf_counter() - clock.start
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    first = clock.ends[0][1] if clock.ends else 0.0
    groups = clock.groups()
    return Course(watched.kind, clock.steps, first, groups, total, peak(device), error)


def _run(path: str, clock: Clock) -> str:
    """Run the script to its end, or to the last step; returns the error, if any."""
    try:
        try:
            runpy.run_path(path, run_name="__main__")
        except EnoughSteps:
            return ""
        except SystemExit as stop:
            if stop.code not in (None, 0):
                return f"ended with status {stop.code}"
        clock.note()
    except Exception as error:
        traceback.print_exc()
        return one_line(error)
    return ""


def main() -> None:
    """`script_worker SETTINGS script.py ARGS`; SETTINGS is JSON, with the path for the answer."""
    settings = json.loads(sys.argv[1])
    answer = Path(settings.pop("answer"))
    sys.argv = sys.argv[2:]
    course = run_script(sys.argv[0], **settings)
    answer.write_text(json.dumps(asdict(course)))
    sys.exit(bool(course.error))


if __name__ == "__main__":
    main()
