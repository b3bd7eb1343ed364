"""What recording whole steps costs, op by op and captured: ``python -m benchmarks.captured``.

Nothing runs: the backend hands out the results of its first run again, so that all of a step's CPU
time on the program's thread is recording, cutting and submitting. Models are as deep as those of
`torpor bench`, and narrow.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch

import torpor
from benchmarks.report import table
from benchmarks.worker import ROOT, environment
from torpor.backend import Backend, register
from torpor.backends import kernels
from torpor.bench.workloads import GPT2, Bert, MLPTraining, SmallGPT, Workload

SMALL = {"batch": 2, "length": 32, "layers": 12, "width": 48}
WORKLOADS: dict[str, Workload] = {
    "gpt2": GPT2(**SMALL, vocabulary=128),
    "gpt2-no-dropout": GPT2(**SMALL, vocabulary=128, dropout=0.0),
    "small-gpt": SmallGPT(),
    "bert": Bert(**SMALL),
    "mlp": MLPTraining(width=16, batch=8),
}


class Nothing(Backend):
    """Runs nothing: gives the same results again and again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.results: dict[int, Any] = {}

    def compile(self, computations: Any) -> list[Any]:
        return list(computations)

    def execute(self, computation: Any, arguments: Any, device: Any) -> Any:
        known = self.results.get(id(computation))
        if known is None:
            made = [_ones(value.type) for value in computation.graph.outputs]
            known = kernels.store(made, computation, arguments, self)
            self.results[id(computation)] = known
        return known


def _ones(type_: Any) -> torch.Tensor:
    return torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype).fill_(1)


def measure(name: str, capture: str, steps: int) -> None:
    """Print the CPU milliseconds of a step, and how many ops and regions it records."""
    register("nothing", Nothing)
    torpor.use("nothing")
    torpor.config.capture, torpor.config.bound = capture, "off"
    program = WORKLOADS[name].build(torpor.lazy, "cpu")
    times = []
    for step in range(10 + steps):
        if step == 10:
            torpor.metrics.reset()
        start = time.thread_time()
        program.step()
        times.append(time.thread_time() - start)
        torpor.wait()
    counted = torpor.metrics.counters()
    of_a_step = [counted.get(name, 0) / steps for name in ("OpsRecorded", "RegionLookups")]
    print(median(times[10:]) * 1e3, *of_a_step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--capture", choices=("off", "on"), help="one of them, in this process")
    arguments = parser.parse_args()
    if arguments.capture:
        measure(arguments.workloads[0], arguments.capture, arguments.steps)
        return
    rows = []
    for name in arguments.workloads:
        found = [_in_a_process(name, capture, arguments.steps) for capture in ("off", "on")]
        (by_op, ops, _), (captured, left, regions) = found
        rows.append(
            (name, f"{by_op:.2f}", f"{ops:.0f}", f"{captured:.2f}", f"{left:.0f}", f"{regions:.0f}")
        )
    columns = ("recording a step", "op by op, CPU ms", "ops", "captured", "ops", "regions")
    print(table(columns, rows))


def _in_a_process(name: str, capture: str, steps: int) -> list[float]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.captured",
        name,
        "--capture",
        capture,
    ]
    done = subprocess.run(
        [*command, "--steps", str(steps)], cwd=ROOT, env=environment(threads=1), check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return [float(number) for number in done.stdout.split()[-3:]]


if __name__ == "__main__":
    main()
