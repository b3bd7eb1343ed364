"""Nanoseconds per recorded op: the most frequent ops of the training step, one at a time.

Each op is called again and again as the step calls it (same shapes, strides and attributes) on
three kinds of tensors: torpor's, eager's, and the floor's, whose `__torch_dispatch__` does nothing
but make as many wrappers as the op returns. What torpor takes above the floor is torpor's own.
Everything is in the processor's caches then; `inside` is the time in `__torch_dispatch__` in the
step itself, where it is not.

Run as a module it measures in its own process and prints JSON; with `--instructions` it counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

import torpor
from benchmarks import counting
from benchmarks.clock import no_gc, timed
from benchmarks.gpt import Size, Training
from benchmarks.systems import torpor_virtual
from benchmarks.tracing import WARM_UP
from torpor.trace.tensor import LazyTensor

CALLS = 200  # of one op in a row; writes in place make a chain of this length
COUNTED_CALLS = 20  # the same number of instructions each time, and valgrind is slow
BEFORE = 20  # calls before those that count: leaves are numbered, caches are warm
OPS = 20
KINDS = ("torpor", "eager", "floor")
make_wrapper = torch.Tensor._make_wrapper_subclass


# -- which ops, and with which arguments --------------------------------------------------------


@dataclass(frozen=True)
class Stand:
    """Stands for a tensor argument: enough to make one like it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        """A plain tensor; integers are 0, so that they are indices of anything."""
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride)) if self.shape else 1
        base = torch.zeros(span, dtype=self.dtype)
        if self.dtype.is_floating_point:
            base.uniform_(0.5, 1.5)
        return torch.as_strided(base, self.shape, self.stride)


@dataclass(frozen=True)
class Call:
    """An op of the step, with the arguments of its first call."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, place: Callable[[torch.Tensor], torch.Tensor], device: str) -> Call:
        """The call on tensors that `place` makes of plain ones."""

        def convert(thing: Any) -> Any:
            if isinstance(thing, Stand):
                return place(thing.make())
            return torch.device(device) if isinstance(thing, torch.device) else thing

        args, kwargs = pytree.tree_map(convert, (self.args, self.kwargs))
        return Call(self.op, args, kwargs)

    def repeat(self, times: int) -> None:
        """The work that is measured."""
        op, args, kwargs = self.op, self.args, self.kwargs
        for _ in range(times):
            op(*args, **kwargs)


Dispatch = Callable[..., Any]


@contextmanager
def watching(around: Callable[[Dispatch], Dispatch]) -> Iterator[None]:
    """Puts a function around torpor's `__torch_dispatch__`."""
    original = LazyTensor.__dict__["__torch_dispatch__"]
    LazyTensor.__torch_dispatch__ = classmethod(around(original.__func__))  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        LazyTensor.__torch_dispatch__ = original  # type: ignore[method-assign]


def census(training: Training) -> tuple[Counter[Any], dict[Any, Call]]:
    """How often one step calls each op, and how."""
    counts: Counter[Any] = Counter()
    calls: dict[Any, Call] = {}

    def describe(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return Stand(tuple(thing.shape), thing.stride(), thing.dtype)
        return thing

    def counted(dispatch: Dispatch) -> Dispatch:
        def watch(cls: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[op] += 1
            if op not in calls:
                calls[op] = Call(op, *pytree.tree_map(describe, (args, kwargs or {})))
            return dispatch(cls, op, types, args, kwargs)

        return watch

    with watching(counted):
        training.step()
    torpor.sync(wait=True)
    return counts, calls


def times_inside(training: Training, rounds: int) -> dict[Any, float]:
    """Nanoseconds inside `__torch_dispatch__`, per call of each op, in the step itself.

    On the wall clock: a median over that many calls does not see those that were interrupted.
    """
    taken: defaultdict[Any, list[int]] = defaultdict(list)
    clock = time.perf_counter_ns

    def timing(dispatch: Dispatch) -> Dispatch:
        def watch(cls: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            start = clock()
            result = dispatch(cls, op, types, args, kwargs)
            taken[op].append(clock() - start)
            return result

        return watch

    with watching(timing):
        for _ in range(rounds):
            with no_gc():
                training.step()
            torpor.sync(wait=True)
    empty = median(-clock() + clock() for _ in range(1000))
    return {op: median(samples) - empty for op, samples in taken.items()}


# -- the floor ---------------------------------------------------------------------------------


class Floor(torch.Tensor):
    """A tensor whose ops do the least that a subclass can do."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    answer: Callable[[tuple[Any, ...]], Any]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.answer(args)


def wrapper_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Arguments that make a wrapper like `tensor`, on torpor's device."""
    device = torch.device("lazy", 0)
    return (
        tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), None, tensor.dtype,
        torch.strided, device,
    )  # fmt: skip


def floor_tensor(tensor: torch.Tensor) -> torch.Tensor:
    wrapped: torch.Tensor = make_wrapper(Floor, *wrapper_of(tensor))
    return wrapped


def floor_answer(call: Call) -> Callable[[tuple[Any, ...]], Any]:
    """What the floor does for an op: nothing for a write, wrappers for results."""
    if any(a.alias_info is not None and a.alias_info.is_write for a in call.op._schema.arguments):
        return (lambda args: args[0]) if call.op._schema.returns else (lambda args: None)
    plain = call.on(lambda t: t, "cpu")
    result = plain.op(*plain.args, **plain.kwargs)
    if isinstance(result, torch.Tensor):
        one = wrapper_of(result)
        return lambda args: make_wrapper(Floor, *one)
    many = [None if t is None else wrapper_of(t) for t in result]
    kind = type(result)
    return lambda args: kind(None if w is None else make_wrapper(Floor, *w) for w in many)


# -- measuring ---------------------------------------------------------------------------------

Measure = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Bench:
    """One op, ready to be called on each kind of tensor."""

    call: Call
    calls: int  # in a step
    kinds: dict[str, Call]
    answer: Callable[[tuple[Any, ...]], Any]

    @classmethod
    def make(cls, call: Call, calls: int) -> Bench:
        kinds = {
            "torpor": call.on(lambda tensor: tensor.to("lazy"), "lazy"),
            "eager": call.on(lambda tensor: tensor, "cpu"),
            "floor": call.on(floor_tensor, "lazy"),
        }
        return cls(call, calls, kinds, floor_answer(call))

    @property
    def name(self) -> str:
        return str(self.call.op).removeprefix("aten.").removesuffix(".default")

    def run(self, measure: Measure, times: int, *kinds: str) -> dict[str, float]:
        """Measure one call of each kind; the trace is empty before and after."""
        Floor.answer = self.answer
        result = {}
        with torch.no_grad():
            for kind in kinds:
                call = self.kinds[kind]
                call.repeat(BEFORE)
                result[kind] = measure(partial(call.repeat, times)) / times
        torpor.sync(wait=True)
        return result


def runs_eagerly(call: Call) -> bool:
    """Eager has a kernel for the op: there is none for the backward of a whole `linear`."""
    try:
        with torch.no_grad():
            call.on(lambda tensor: tensor, "cpu").repeat(1)
    except NotImplementedError:
        return False
    return True


def prepare(size: Size) -> tuple[Training, list[Bench], int]:
    """The step, its most frequent ops, and how many ops it has."""
    training = Training(size, "adamw", torpor_virtual().place)
    for _ in range(WARM_UP):
        training.step()
        torpor.sync(wait=True)
    counts, calls = census(training)
    comparable = [(op, count) for op, count in counts.most_common() if runs_eagerly(calls[op])]
    benches = [Bench.make(calls[op], count) for op, count in comparable[:OPS]]
    return training, benches, sum(counts.values())


def nanoseconds(training: Training, benches: list[Bench], rounds: int) -> dict[str, Any]:
    """CPU time per call; the ops take turns."""
    samples: list[list[dict[str, float]]] = [[] for _ in benches]

    def measure(work: Callable[[], object]) -> float:
        return timed(work).cpu * 1e9

    for _ in range(WARM_UP + rounds):
        with no_gc():
            for bench, taken in zip(benches, samples):
                taken.append(bench.run(measure, CALLS, *KINDS))
    inside = times_inside(training, rounds)
    return {
        "ops": [
            {"op": bench.name, "calls": bench.calls, "inside": inside[bench.call.op]}
            | {kind: median(sample[kind] for sample in taken[WARM_UP:]) for kind in KINDS}
            for bench, taken in zip(benches, samples)
        ],
        "inside": inside_step(inside, benches),
    }


def inside_step(inside: dict[Any, float], benches: list[Bench]) -> float:
    """Nanoseconds that the ops in the table spend inside torpor in one step."""
    return sum(inside[bench.call.op] * bench.calls for bench in benches)


def instructions(training: Training, benches: list[Bench]) -> dict[str, Any]:
    """Instructions per call of each op, of recording one whole step, and of its cut."""
    counter = counting.counter()
    rows = []
    with no_gc():
        for bench in benches:
            for measure in (_unmeasured, _unmeasured, counter.count):  # writes meet their nodes
                counted = bench.run(measure, COUNTED_CALLS, "torpor", "floor")
            rows.append({"op": bench.name, "calls": bench.calls} | counted)
        step, cut = counter.count(training.step), counter.count(torpor.sync)
    torpor.wait()
    return {"ops": rows, "step": step, "cut": cut}


def _unmeasured(work: Callable[[], object]) -> float:
    work()
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=json.loads, default={}, help="JSON: fields of gpt.Size")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--instructions", action="store_true", help="count instead of timing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    training, benches, recorded = prepare(Size(**arguments.size))
    if arguments.instructions:
        result = instructions(training, benches)
    else:
        result = nanoseconds(training, benches, arguments.rounds)
    json.dump(result | {"recorded": recorded}, sys.stdout)


if __name__ == "__main__":
    main()
