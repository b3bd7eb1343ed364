"""What the first trace of a process costs: equal layers must pay for type inference once.

The bar: 24 equal layers, cold, cost at most 1.3 times 2 layers, cold, plus 22 layers, warm. Each
sample is a process of its own; the warm layers are those of the same processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.clock import Time, medians
from benchmarks.tracing import WARM_UP
from benchmarks.worker import Worker

MANY, FEW = 24, 2
WARM_STEPS = 5
BAR = 1.3


@dataclass(frozen=True)
class Depth:
    """Models of one depth: the first step of each process, and the warm steps after it."""

    layers: int
    cold: list[Time]
    warm: list[Time]

    def as_json(self) -> dict[str, Any]:
        return {"layers": self.layers, "cold": self.cold, "warm": self.warm}


@dataclass(frozen=True)
class Cold:
    """Both depths, by pairs of processes that ran one after the other."""

    many: Depth
    few: Depth

    @property
    def allowed_cost(self) -> Time:
        """2 cold layers and 22 warm ones, before the factor."""
        few, many, first = medians(self.few.warm), medians(self.many.warm), medians(self.few.cold)
        return Time(first.wall + many.wall - few.wall, first.cpu + many.cpu - few.cpu)

    @property
    def ratio(self) -> Time:
        cold, allowed = medians(self.many.cold), self.allowed_cost
        return Time(cold.wall / allowed.wall, cold.cpu / allowed.cpu)

    @property
    def layer_ratio(self) -> float:
        """One further layer, cold against warm (CPU time): stricter, as start-up costs cancel."""
        pairs = zip(self.many.cold, self.few.cold, self.many.warm, self.few.warm)
        return median((mc.cpu - fc.cpu) / (mw.cpu - fw.cpu) for mc, fc, mw, fw in pairs)

    def as_json(self) -> dict[str, Any]:
        return {
            "many": self.many.as_json(),
            "few": self.few.as_json(),
            "allowed": self.allowed_cost._asdict(),
            "ratio": self.ratio._asdict(),
            "layer_ratio": self.layer_ratio,
        }


def measure(processes: int, size: dict[str, Any], advance: Callable[[str], None]) -> Cold:
    """`processes` fresh processes of each depth, in turns."""
    result = Cold(Depth(MANY, [], []), Depth(FEW, [], []))
    for number in range(processes):
        for depth in (result.many, result.few):
            cold, warm = _one_process(size | {"layers": depth.layers})
            depth.cold.append(cold)
            depth.warm.append(warm)
            advance(f"{depth.layers} layers, process {number + 1} of {processes}")
    return result


def _one_process(size: dict[str, Any]) -> tuple[Time, Time]:
    with Worker("torpor", "adamw", **size) as worker:
        cold = worker.step().trace
        for _ in range(WARM_UP - 1):
            worker.step()
        return cold, medians([worker.second_step().trace for _ in range(WARM_STEPS)])
