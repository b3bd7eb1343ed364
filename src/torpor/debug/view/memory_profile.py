"""Memory over the run of a graph, by the user's lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from torpor.ir.graph import Graph
from torpor.ir.node import Value
from torpor.ir.types import TensorType
from torpor.observe.memory import lifetimes

POINTS: Final = 600
"""Moments that are shown; of those in between the worst one."""

LINES: Final = 7
"""Lines that are shown on their own."""

OTHERS: Final = "all other lines"


@dataclass(frozen=True, slots=True)
class LineMemory:
    """What one line keeps alive."""

    line: str
    at_peak: int  # bytes at the worst moment of the graph
    most: int  # bytes at its own worst moment
    buffers: int
    points: list[int] | None  # bytes at each moment shown; None: part of the others


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes that are alive while a graph runs, besides its inputs."""

    inputs: int
    peak: int
    peak_node: int
    positions: list[int]  # the nodes that are shown
    totals: list[int]  # bytes alive at each of them
    others: list[int]  # those of lines that are not shown on their own
    lines: list[LineMemory]  # the largest first


Lives = dict[Value, tuple[int, int, int]]


def memory_of(graph: Graph, lives: Lives | None = None) -> MemoryProfile:
    """What a graph will need when its nodes run in order."""
    lives = lifetimes(graph) if lives is None else lives
    length = max(1, len(graph.nodes))
    changes: dict[str, list[int]] = defaultdict(lambda: [0] * (length + 1))
    buffers: Counter[str] = Counter()
    for value, (size, first, last) in lives.items():
        line = "" if value.node.site is None else str(value.node.site)
        changes[line][first] += size
        changes[line][min(last, length - 1) + 1] -= size
        buffers[line] += 1
    series = {line: list(accumulate(change[:length])) for line, change in changes.items()}
    totals = [sum(column) for column in zip(*series.values())] or [0] * length
    shown = _worst_moments(totals)
    peak = max(range(length), key=totals.__getitem__)
    order = sorted(series, key=lambda line: (-series[line][peak], -max(series[line]), line))
    inputs = sum(v.type.nbytes for v in graph.inputs if isinstance(v.type, TensorType))
    return MemoryProfile(
        inputs,
        totals[peak],
        peak,
        shown,
        [totals[i] for i in shown],
        [sum(series[line][i] for line in order[LINES:]) for i in shown],
        [
            LineMemory(
                line,
                series[line][peak],
                max(series[line]),
                buffers[line],
                [series[line][i] for i in shown] if rank < LINES else None,
            )
            for rank, line in enumerate(order)
        ],
    )


def _worst_moments(totals: list[int]) -> list[int]:
    """Few places, one of every stretch: where it is largest."""
    if len(totals) <= POINTS:
        return list(range(len(totals)))
    edges = [len(totals) * i // POINTS for i in range(POINTS + 1)]
    return [max(range(a, b), key=totals.__getitem__) for a, b in pairwise(edges)]
