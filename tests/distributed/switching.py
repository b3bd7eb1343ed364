"""Ranks that compile: what the tests of their switch to compiled code compare."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import torpor
from tests.distributed.programs import group_of, plain
from torpor.backend import Computation
from torpor.backend.registry import register
from torpor.backends.reference.compile import ReferenceBackend
from torpor.compiling.background import COMPILER
from torpor.execute.sync import PLANS


class Gated(ReferenceBackend):
    """The reference, once the gate is open."""

    name = "gated"
    compile_after = 1
    gate = threading.Event()
    fails = False
    runs = 0

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        assert Gated.gate.wait(60)
        if Gated.fails:
            raise RuntimeError("no such instruction")
        return list(computations)

    def execute(self, *args: Any) -> Any:
        Gated.runs += 1
        return super().execute(*args)


register("gated", Gated)


@contextmanager
def _settings(**values: Any) -> Iterator[None]:
    before = {name: getattr(torpor.config, name) for name in values}
    for name, value in values.items():
        setattr(torpor.config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(torpor.config, name, value)


def _step(weight: torch.Tensor, group: Any) -> None:
    with torch.no_grad():
        half = weight * 0.5
        dist.all_reduce(half, group=group)
        weight += half - weight
    torpor.sync()


def switch(kind: str) -> tuple[list[bool], float, list[float]] | None:
    """Which steps ran compiled, how long the slowest took, and the weight in the end.

    Rank 1 has its graph compiled in the fourth step, fails to compile it, or forgets in the sixth
    what it has compiled.
    """
    group = group_of(2)
    if group is None:
        return None
    late = dist.get_rank() == 1
    Gated.gate.clear()
    Gated.fails, Gated.runs = kind == "fails" and late, 0
    if not late:
        Gated.gate.set()
    weight, compiled, slowest = torpor.lazy(torch.ones(4)), [], 0.0
    with _settings(compile_async=True, cache=False), torpor.using("gated"):
        for step in range(10):
            start, before = time.monotonic(), Gated.runs
            _step(weight, group)
            slowest = max(slowest, time.monotonic() - start)
            compiled.append(Gated.runs > before)
            if step == 3:
                Gated.gate.set()
                COMPILER.wait()
            if kind == "forgets" and step == 5 and late:
                PLANS.clear()
    return compiled, slowest, plain(weight).tolist()


def take_compiled_code(limit: float) -> tuple[dict[str, int], int] | None:
    """Two ranks with empty caches of their own: counters, and the first step that ran compiled."""
    group = group_of(2)
    if group is None:
        return None
    torpor.metrics.reset()
    weight, first = torpor.lazy(torch.ones(64)), 0
    deadline = time.monotonic() + limit
    folder = tempfile.TemporaryDirectory()
    settings = _settings(cache=True, cache_dir=folder.name, compile_async=True)
    with folder, settings, torpor.using("inductor"):
        while not _ran_compiled(weight, group):
            first += 1
            assert time.monotonic() < deadline, torpor.metrics.counters()
            time.sleep(0.05)
    return dict(torpor.metrics.counters()), first


def _ran_compiled(weight: torch.Tensor, group: Any) -> bool:
    before = torpor.metrics.counters().get("InterpretedGraph", 0)
    _step(weight, group)
    return torpor.metrics.counters().get("InterpretedGraph", 0) == before


def fail_strictly() -> tuple[str, str, float, list[float]] | None:
    """The error each rank gets if rank 1 cannot compile, and wants to know."""
    group = group_of(2)
    if group is None:
        return None
    Gated.gate.set()
    Gated.fails = dist.get_rank() == 1
    weight, start, error = torpor.lazy(torch.ones(4)), time.monotonic(), None
    with _settings(compile_async=False, cache=False, strict=True), torpor.using("gated"):
        try:
            for _ in range(4):
                _step(weight, group)
        except Exception as raised:  # any: the test says which one it has to be
            error = raised
    took = time.monotonic() - start
    return type(error).__name__, str(error), took, plain(weight).tolist()
