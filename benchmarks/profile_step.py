"""Where the time of a training step goes: ``python -m benchmarks.profile_step --help``.

For whoever makes recording faster. Four views of the same step, of which the first two disturb it
least: CPU time by phase; time inside `__torch_dispatch__` by op; native symbols (perf, where it
works); Python functions (cProfile, which makes Python look slower than C).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import Time, medians, no_gc, timed
from benchmarks.gpt import OPTIMIZERS, Size, Training
from benchmarks.report import table
from benchmarks.systems import SYSTEMS, System
from benchmarks.tracing import WARM_UP

VIEWS = ("phases", "ops", "perf", "python")


class Subject:
    """A training step on a system, warm unless asked otherwise."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.system: System = SYSTEMS[arguments.system]()
        size = Size(**arguments.size)
        self.training = Training(size, arguments.optimizer, self.system.place)
        self.finish()
        if not arguments.cold:
            for _ in range(WARM_UP):
                self.training.step()
                self.finish()

    def finish(self) -> None:
        self.system.cut()
        self.system.wait()

    def phases(self) -> dict[str, Callable[[], object]]:
        training = self.training
        return {
            "forward": training.forward,
            "backward": training.backward,
            "optimizer": training.optimizer.step,
            "zero_grad": training.optimizer.zero_grad,
            "cut": self.system.cut,
        }


# -- views -------------------------------------------------------------------------------------


def show_phases(subject: Subject, steps: int) -> None:
    samples: dict[str, list[Time]] = {name: [] for name in subject.phases()}
    for _ in range(steps):
        with no_gc():
            for name, phase in subject.phases().items():
                samples[name].append(timed(phase))
        subject.system.wait()
    times = {name: medians(taken) for name, taken in samples.items()}
    whole = sum(t.cpu for t in times.values())
    rows = [
        (name, f"{t.cpu * 1e3:.2f}", f"{t.wall * 1e3:.2f}", f"{t.cpu / whole:.0%}")
        for name, t in times.items()
    ]
    print(table((f"phase, median of {steps}", "CPU ms", "wall ms", "share"), rows))


def show_ops(subject: Subject, steps: int, limit: int) -> None:
    from benchmarks import micro  # loads torpor, which excludes torch._lazy

    counts, _ = micro.census(subject.training)
    inside = micro.times_inside(subject.training, steps)
    cost = {op: inside[op] * count for op, count in counts.items()}
    rows = [
        (str(op), f"{counts[op]}", f"{inside[op]:,.0f}", f"{cost[op] / 1e6:.2f}")
        for op in sorted(cost, key=cost.__getitem__, reverse=True)[:limit]
    ]
    rows.append(("all", f"{counts.total()}", "", f"{sum(cost.values()) / 1e6:.2f}"))
    print(table(("inside __torch_dispatch__", "calls", "ns per call", "ms per step"), rows))


def show_python(subject: Subject, steps: int, limit: int, sort: str) -> None:
    profiles = {"the step": cProfile.Profile(), "the cut": cProfile.Profile()}
    for _ in range(steps):
        profiles["the step"].runcall(subject.training.step)
        profiles["the cut"].runcall(subject.system.cut)
        subject.system.wait()
    for title, profile in profiles.items():
        print(f"cProfile of {title}, {steps} times")
        pstats.Stats(profile).strip_dirs().sort_stats(sort).print_stats(limit)


def show_perf(subject: Subject, steps: int, limit: int) -> None:
    if shutil.which("perf") is None:
        print("no native profile: there is no perf here")
        return
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "perf.data"))
        thread = str(threading.get_native_id())
        # the software clock works where there are no hardware counters
        command = ["perf", "record", "-e", "cpu-clock", "-F", "4999", "-o", data, "-t", thread]
        recording = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        time.sleep(1.0)
        for _ in range(steps):
            subject.training.step()
            subject.finish()
        recording.send_signal(signal.SIGINT)
        _, said = recording.communicate()
        if recording.returncode not in (0, -signal.SIGINT):
            print(f"no native profile: {said.strip().splitlines()[-1]}")
            return
        for what in ("dso", "dso,symbol"):
            _print_perf(data, what, limit)


def _print_perf(data: str, what: str, limit: int) -> None:
    command = ["perf", "report", "-i", data, "--stdio", "--percent-limit", "0.3", "--sort", what]
    report = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.findall(r"^\s+([\d.]+)%\s+(\S+)\s*(?:\[\S\] (.*?))?(?:\s+-\s+-)?\s*$", report, re.M)
    rows = [
        (f"{symbol or library}"[:90], f"{share} %", library) for share, library, symbol in found
    ]
    print(table((f"perf, by {what}", "samples", "library"), rows[:limit]), end="\n\n")


# -- command -----------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_step", description=__doc__)
    parser.add_argument("views", nargs="*", metavar="view", help=", ".join(VIEWS))
    parser.add_argument("--system", choices=SYSTEMS, default="torpor")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--size", type=json.loads, default={}, help='e.g. {"layers": 2}')
    parser.add_argument("--cold", action="store_true", help="the first step of the process")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--limit", type=int, default=25, help="rows of a table")
    parser.add_argument("--sort", default="tottime", help="of cProfile: tottime, cumtime, ncalls")
    arguments = parser.parse_args()
    if unknown := set(arguments.views) - set(VIEWS):
        parser.error(f"no such view: {', '.join(unknown)}")
    return arguments


def _default_views(arguments: argparse.Namespace) -> Iterable[str]:
    if arguments.cold:
        return ("python",)  # there is one first step
    return VIEWS if arguments.system.startswith("torpor") else ("phases", "perf", "python")


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    steps, limit = 1 if arguments.cold else arguments.steps, arguments.limit
    subject = Subject(arguments)
    views: dict[str, Callable[[], Any]] = {
        "phases": lambda: show_phases(subject, steps),
        "ops": lambda: show_ops(subject, steps, limit),
        "perf": lambda: show_perf(subject, 4 * steps, limit),
        "python": lambda: show_python(subject, steps, limit, arguments.sort),
    }
    for name in arguments.views or _default_views(arguments):
        views[name]()
        print()


if __name__ == "__main__":
    main()
