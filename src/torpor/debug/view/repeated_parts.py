"""Finds equal parts of a graph, for display: repeats of nodes, and parts of the same structure.

    mul add relu mul add relu mul add relu exp   ->   (mul add relu) x 3, exp

Two parts are equal if their nodes have the same ops, attributes and types in the same order, with
the same connections inside; operands from outside may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from torpor.debug.view.cost import is_view
from torpor.ir.graph import Graph
from torpor.ir.node import Node
from torpor.text.printer import argument_text, type_text

_MODULUS: Final = (1 << 61) - 1
_BASE: Final = 1_000_003
_MOST_PERIODS: Final = 12
"""The most distances to the next equal node to try as the length of a repeated part."""


class RepeatedPart(NamedTuple):
    """`times` consecutive equal parts of `period` nodes each."""

    start: int
    period: int
    times: int

    @property
    def length(self) -> int:
        return self.period * self.times


class LabelledGraph:
    """The nodes of a graph as labels, and their connections."""

    def __init__(self, graph: Graph) -> None:
        known: dict[tuple[str, ...], int] = {}
        place = {node: i for i, node in enumerate(graph.nodes)}
        inputs = set(graph.inputs)
        self.labels = [known.setdefault(_label(n), len(known)) for n in graph.nodes]
        self.operands = [
            [-1 if v in inputs else place.get(v.node, -1) for v in node.operands]
            for node in graph.nodes
        ]
        self.of_inputs: set[int] = set()  # nodes of inputs only, and views of those
        for i, operands in enumerate(self.operands):
            inner = [operand for operand in operands if operand >= 0]
            if not inner or (self.of_inputs.issuperset(inner) and is_view(graph.nodes[i])):
                self.of_inputs.add(i)

    def shape_of(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """The structure of a part, independent of the order of its nodes.

        Nodes computed from inputs only are shared by their first user, so they are excluded.
        """
        known: dict[int, int] = {}
        for node in nodes:
            if node not in self.of_inputs:
                inside = tuple(known.get(operand, -1) for operand in self.operands[node])
                known[node] = hash((self.labels[node], inside))
        return tuple(sorted(known.values()))

    def repeats(self, nodes: Sequence[int]) -> list[RepeatedPart]:
        """Consecutive equal parts of `nodes`; positions are relative to `nodes`."""
        lengths = _CommonLengths([self.labels[n] for n in nodes])
        found: list[RepeatedPart] = []
        start = 0
        while start < len(nodes):
            best = self._best(nodes, start, lengths)
            if best is None:
                start += 1
            else:
                found.append(best)
                start += best.length
        return found

    def _best(
        self, nodes: Sequence[int], start: int, lengths: _CommonLengths
    ) -> RepeatedPart | None:
        """The repeat at `start` that covers most; of equals, the one with the shortest parts."""
        best: RepeatedPart | None = None
        for period in lengths.periods(start):
            count = lengths.common(start, start + period) // period + 1
            covered = 0 if best is None else best.length
            if count > 1 and period * count > covered:
                count = self._equal_parts(nodes, start, period, count)
                if count > 1 and period * count > covered:
                    best = RepeatedPart(start, period, count)
        return best

    def _equal_parts(self, nodes: Sequence[int], start: int, period: int, count: int) -> int:
        """How many of the parts, whose labels are equal, have equal connections."""
        first = self._part(nodes[start : start + period])
        for i in range(1, count):
            begin = start + i * period
            if self._part(nodes[begin : begin + period]) != first:
                return i
        return count

    def _part(self, nodes: Sequence[int]) -> list[list[int]]:
        place = {node: i for i, node in enumerate(nodes)}
        return [[place.get(operand, -1) for operand in self.operands[n]] for n in nodes]


def _label(node: Node) -> tuple[str, ...]:
    arguments = (argument_text(arg, lambda value: type_text(value)) for arg in node.args)
    return node.op.name, *arguments, *map(type_text, node.outputs)


class _CommonLengths:
    """Longest common prefixes of two suffixes of a list of labels, by hashes of its prefixes."""

    def __init__(self, labels: Sequence[int]) -> None:
        self.labels = labels
        self.hashes, self.powers = [0], [1]
        for label in labels:
            self.hashes.append((self.hashes[-1] * _BASE + label + 1) % _MODULUS)
            self.powers.append(self.powers[-1] * _BASE % _MODULUS)
        self.following: list[int] = [-1] * len(labels)  # the next position with the same label
        last: dict[int, int] = {}
        for place in range(len(labels) - 1, -1, -1):
            self.following[place] = last.get(labels[place], -1)
            last[labels[place]] = place

    def periods(self, start: int) -> list[int]:
        """Distances to the next positions with the same label that leave room for a repeat."""
        found: list[int] = []
        place = self.following[start]
        while place >= 0 and len(found) < _MOST_PERIODS and 2 * place - start <= len(self.labels):
            found.append(place - start)
            place = self.following[place]
        return found

    def common(self, one: int, other: int) -> int:
        """The length of the common prefix from positions `one` and `other`, `one` < `other`."""
        low, high = 0, len(self.labels) - other
        while low < high:
            middle = (low + high + 1) // 2
            if self._hash(one, middle) == self._hash(other, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _hash(self, start: int, length: int) -> int:
        end = start + length
        return (self.hashes[end] - self.hashes[start] * self.powers[length]) % _MODULUS
