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
"""Number of points to show; each is the maximum of its interval."""

LINES: Final = 7
"""The most lines to show individually."""

OTHERS: Final = "all other lines"


@dataclass(frozen=True, slots=True)
class LineMemory:
    """The memory that one line keeps alive."""

    line: str
    at_peak: int  # bytes at the graph's peak
    most: int  # bytes at the line's own peak
    buffers: int
    points: list[int] | None  # bytes at each point shown; None: part of the others


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes that are alive while a graph runs, besides its inputs."""

    inputs: int
    peak: int
    peak_node: int
    positions: list[int]  # the nodes that are shown
    totals: list[int]  # bytes alive at each of them
    others: list[int]  # of lines that are not shown individually
    lines: list[LineMemory]  # largest first


Lives = dict[Value, tuple[int, int, int]]


def memory_of(graph: Graph, lives: Lives | None = None) -> MemoryProfile:
    """The memory a graph needs if its nodes run in order."""
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
    """Positions to show: the maximum of each of a limited number of intervals."""
    if len(totals) <= POINTS:
        return list(range(len(totals)))
    edges = [len(totals) * i // POINTS for i in range(POINTS + 1)]
    return [max(range(a, b), key=totals.__getitem__) for a, b in pairwise(edges)]
