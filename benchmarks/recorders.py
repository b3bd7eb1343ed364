"""Recording one op, against the least that it could take.

The ops are the 30 most frequent of the model suite: one training step of each network of the
conformance kit and of the benchmark's GPT. Each is called again and again as its network calls it,
recorded by torpor and on the floor (`benchmarks.micro`). `TORPOR_NATIVE=off` shows what Python
takes by itself.

Run as a module it measures in its own process and prints JSON; with `--instructions` it counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import torpor
from benchmarks import counting
from benchmarks.clock import Time, medians, no_gc, timed
from benchmarks.gpt import Size, Training
from benchmarks.micro import CALLS, COUNTED_CALLS, Bench, Call, census, runs_eagerly
from benchmarks.systems import torpor_virtual
from benchmarks.tracing import WARM_UP
from torpor import _torch
from torpor.ops.spec import Mode, OpSpec, spec_of
from torpor.testing.networks import NETWORKS, Network
from torpor.trace.dispatch import SPECIAL

OPS = 30
PATHS = ("torpor", "floor")
BINARY = "add.Tensor"  # its whole dispatch is held against the floor


class Steps:
    """Training steps of one network."""

    def __init__(self, network: Network) -> None:
        torch.manual_seed(0)
        self.model = network.build().to("lazy")
        self.input, self.labels = (tensor.to("lazy") for tensor in network.batch(0))
        self.optimizer = network.optimizer(list(self.model.parameters()))

    def step(self) -> None:
        F.cross_entropy(self.model(self.input), self.labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


def suite() -> Iterator[Any]:
    """What is trained."""
    yield Training(Size(), "adamw", torpor_virtual().place)
    yield from map(Steps, NETWORKS.values())


def most_frequent() -> list[tuple[Call, int]]:
    """The ops recorded by their signature that a step of each network calls most, together."""
    counts: Counter[Any] = Counter()
    calls: dict[Any, Call] = {}
    for training in suite():
        for _ in range(WARM_UP):
            training.step()
            torpor.sync(wait=True)
        counted, called = census(training)
        counts += counted
        calls = called | calls
    found = [(calls[op], n) for op, n in counts.most_common() if is_usual(spec_of(op))]
    return [(call, n) for call, n in found if runs_eagerly(call)][:OPS]


def is_usual(spec: OpSpec) -> bool:
    """Calls of the op are recorded by its signature, and by nothing else."""
    composite = _torch.is_composite(spec.target)
    return spec.mode in (Mode.RECORD, Mode.VIEW) and spec.name not in SPECIAL and not composite


def run(bench: Bench, measure: Callable[[Callable[[], object]], Any], times: int) -> dict[str, Any]:
    """Measure that many calls in each way; the trace is empty before and after."""
    found: dict[str, Any] = {}
    for way in PATHS:

        def keep(work: Callable[[], object], way: str = way) -> float:
            found[way] = measure(work)
            return 0.0

        bench.run(keep, times, way)
    return found


def nanoseconds(rounds: int) -> list[dict[str, Any]]:
    """CPU and wall nanoseconds per call, medians; the ops take turns."""
    ops = [Bench.make(call, calls) for call, calls in most_frequent()]
    taken: list[list[dict[str, Time]]] = [[] for _ in ops]
    for _ in range(WARM_UP + rounds):
        with no_gc():
            for op, samples in zip(ops, taken):
                samples.append(run(op, timed, CALLS))
    return [_row(op, samples[WARM_UP:]) for op, samples in zip(ops, taken)]


def _row(bench: Bench, samples: list[dict[str, Time]]) -> dict[str, Any]:
    row: dict[str, Any] = {"op": bench.name, "calls": bench.calls}
    for way in PATHS:
        time = medians([sample[way] for sample in samples])
        row[way] = [seconds / CALLS * 1e9 for seconds in time]
    return row


def instructions() -> list[dict[str, Any]]:
    """Instructions per call."""
    counter = counting.counter()
    rows = []
    with no_gc():
        for call, calls in most_frequent():
            bench = Bench.make(call, calls)
            for measure in (_unmeasured, _unmeasured, counter.count):  # writes meet their nodes
                counted = run(bench, measure, COUNTED_CALLS)
            rows.append(
                {"op": bench.name, "calls": calls}
                | {way: count / COUNTED_CALLS for way, count in counted.items()}
            )
    return rows


def _unmeasured(work: Callable[[], object]) -> int:
    work()
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--instructions", action="store_true", help="count instead of timing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = instructions() if arguments.instructions else nanoseconds(arguments.rounds)
    json.dump({"ops": rows}, sys.stdout)


if __name__ == "__main__":
    main()
