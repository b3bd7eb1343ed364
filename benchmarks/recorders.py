"""Recording one op: the generated recorder against a walk over its arguments.

The ops are the 30 most frequent of the model suite: one training step of each network of the
conformance kit and of the benchmark's GPT. Each is called again and again as its network calls it,
recorded by its specialised recorder, by `trace.recorder.record`, and on the floor
(`benchmarks.micro`).

Run as a module it measures in its own process and prints JSON; with `--instructions` it counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from torpor.specialize.recorders import specialised
from torpor.testing.networks import NETWORKS, Network
from torpor.trace.dispatch import SPECIAL
from torpor.trace.recorder import record, recording_of

OPS = 30
WAYS = ("generated", "generic", "floor")
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
    """The ops with a recorder of their own that a step of each network calls most, together."""
    counts: Counter[Any] = Counter()
    calls: dict[Any, Call] = {}
    for training in suite():
        for _ in range(WARM_UP):
            training.step()
            torpor.sync(wait=True)
        counted, called = census(training)
        counts += counted
        calls = called | calls
    found = [(calls[op], n) for op, n in counts.most_common() if is_generated(spec_of(op))]
    return [(call, n) for call, n in found if runs_eagerly(call)][:OPS]


def is_generated(spec: OpSpec) -> bool:
    """Calls of the op go to a generated recorder, and to nothing else."""
    composite = _torch.is_composite(spec.target)
    return spec.mode in (Mode.RECORD, Mode.VIEW) and spec.name not in SPECIAL and not composite


@contextmanager
def recorded_by(op: Any, recorder: Callable[..., Any]) -> Iterator[None]:
    """Lets `recorder` record an op."""
    before = op._torpor_record
    _torch.set_op_attribute(op, "_torpor_record", recorder)
    try:
        yield
    finally:
        _torch.set_op_attribute(op, "_torpor_record", before)


@dataclass(frozen=True)
class Ways:
    """One op, ready to be recorded in each way."""

    bench: Bench
    recorders: dict[str, Callable[..., Any]]

    @classmethod
    def of(cls, call: Call, calls: int) -> Ways:
        spec = spec_of(call.op)
        recording = recording_of(spec)
        recorders = {
            "generated": specialised(spec),
            "generic": lambda *args, **kwargs: record(recording, args, kwargs),
        }
        return cls(Bench.make(call, calls), recorders)

    def run(self, measure: Callable[[Callable[[], object]], Any], times: int) -> dict[str, Any]:
        """Measure that many calls in each way; the trace is empty before and after."""
        result: dict[str, Any] = {}
        for way, recorder in self.recorders.items():
            with recorded_by(self.bench.call.op, recorder):
                result[way] = self._measured("torpor", measure, times)
        result["floor"] = self._measured("floor", measure, times)
        return result

    def _measured(self, kind: str, measure: Callable[..., Any], times: int) -> Any:
        found: list[Any] = []

        def keep(work: Callable[[], object]) -> float:
            found.append(measure(work))
            return 0.0

        self.bench.run(keep, times, kind)
        return found[0]


def nanoseconds(rounds: int) -> list[dict[str, Any]]:
    """CPU and wall nanoseconds per call, medians; the ops take turns."""
    ops = [Ways.of(call, calls) for call, calls in most_frequent()]
    taken: list[list[dict[str, Time]]] = [[] for _ in ops]
    for _ in range(WARM_UP + rounds):
        with no_gc():
            for op, samples in zip(ops, taken):
                samples.append(op.run(timed, CALLS))
    return [_row(op, samples[WARM_UP:]) for op, samples in zip(ops, taken)]


def _row(op: Ways, samples: list[dict[str, Time]]) -> dict[str, Any]:
    row: dict[str, Any] = {"op": op.bench.name, "calls": op.bench.calls}
    for way in WAYS:
        time = medians([sample[way] for sample in samples])
        row[way] = [seconds / CALLS * 1e9 for seconds in time]
    return row


def instructions() -> list[dict[str, Any]]:
    """Instructions per call."""
    counter = counting.counter()
    rows = []
    with no_gc():
        for call, calls in most_frequent():
            op = Ways.of(call, calls)
            for measure in (_unmeasured, _unmeasured, counter.count):  # writes meet their nodes
                counted = op.run(measure, COUNTED_CALLS)
            rows.append(
                {"op": op.bench.name, "calls": calls}
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
