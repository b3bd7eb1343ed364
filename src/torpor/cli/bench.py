"""``torpor bench``: what recording a training step costs, next to eager's whole step.

Ratios of one run on one machine; the repository's ``make bench`` adds other systems.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torpor
from torpor.cli import terminal
from torpor.cli.char_gpt import Text, make_text
from torpor.cli.demo import (
    Plan,
    Training,
    add_threads_argument,
    physical_device,
    positive,
    threads,
    warm_up,
)

NAME = "bench"
HELP = "measure recording and running a small GPT's training step against eager"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one training step: until Python is free again, and until it is computed."""

    first_ms: float
    returned_ms: float
    finished_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, default=12)
    parser.add_argument("--width", type=positive, default=64, help="a multiple of 4")
    parser.add_argument("--batch", type=positive, default=2)
    parser.add_argument("--repeat", type=positive, default=15, help="warm steps; the median counts")
    add_threads_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    plan = Plan(
        layers=arguments.layers,
        width=arguments.width,
        batch=arguments.batch,
        length=32,
        dropout=0.0,
    )
    text = Text.encode(make_text(sentences=50))
    with threads(arguments.threads):
        warm_up(physical_device())
        eager = measure("eager", Training(physical_device(), plan, text), arguments.repeat)
        lazy = measure("lazy", Training("lazy", plan, text), arguments.repeat)
    if arguments.json:
        print(json.dumps({"eager": vars(eager), "lazy": vars(lazy)}, indent=2))
    else:
        _show(arguments, eager, lazy)
    return 0


def measure(label: str, training: Training, repeat: int) -> Timing:
    """Each step starts with an empty device queue."""
    unmeasured = 3
    steps = []
    with terminal.progress(label, unmeasured + repeat) as advance:
        for _ in range(unmeasured + repeat):
            steps.append(_measure_step(training.step))
            advance("")
    returned, finished = zip(*steps[unmeasured:])
    return Timing(steps[0][1], median(returned), median(finished))


def _measure_step(step: Callable[[], object]) -> tuple[float, float]:
    torpor.wait()
    start = time.perf_counter()
    step()
    returned = time.perf_counter()
    torpor.wait()
    finished = time.perf_counter()
    return (returned - start) * 1e3, (finished - start) * 1e3


def _show(arguments: argparse.Namespace, eager: Timing, lazy: Timing) -> None:
    whole = eager.finished_ms
    rows = [
        ("eager, whole step", f"{whole:.1f}", "1.00"),
        ("lazy, recording", f"{lazy.returned_ms:.1f}", f"{lazy.returned_ms / whole:.2f}"),
        ("lazy, whole step", f"{lazy.finished_ms:.1f}", f"{lazy.finished_ms / whole:.2f}"),
        ("lazy, first step", f"{lazy.first_ms:.1f}", f"{lazy.first_ms / whole:.2f}"),
    ]
    terminal.heading(f"{arguments.layers}-layer GPT training step, median of {arguments.repeat}")
    terminal.table(("what", "ms", "of eager's step"), rows)
