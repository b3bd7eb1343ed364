"""Equal parts of a graph, for display: runs of nodes that repeat, and parts of the same structure.

    mul add relu mul add relu mul add relu exp   ->   (mul add relu) x 3, exp

Two parts are equal if their nodes have the same ops, attributes and types in the same order, and
take their operands from the same places inside; where operands come from outside does not matter.
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
"""Distances to the next equal node that are tried as the length of a repeated part."""


class RepeatedPart(NamedTuple):
    """`times` equal parts of `period` nodes each, side by side."""

    start: int
    period: int
    times: int

    @property
    def length(self) -> int:
        return self.period * self.times


class LabelledGraph:
    """The nodes of a graph as labels, and how they hang together."""

    def __init__(self, graph: Graph) -> None:
        known: dict[tuple[str, ...], int] = {}
        place = {node: i for i, node in enumerate(graph.nodes)}
        inputs = set(graph.inputs)
        self.labels = [known.setdefault(_label(n), len(known)) for n in graph.nodes]
        self.operands = [
            [-1 if v in inputs else place.get(v.node, -1) for v in node.operands]
            for node in graph.nodes
        ]
        self.of_inputs: set[int] = set()  # nodes that take nothing but inputs, and views of those
        for i, operands in enumerate(self.operands):
            inner = [operand for operand in operands if operand >= 0]
            if not inner or (self.of_inputs.issuperset(inner) and is_view(graph.nodes[i])):
                self.of_inputs.add(i)

    def shape_of(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """What equal parts have in common, whatever the order of their nodes.

        What is made of inputs alone belongs to whoever made it first, so it is left out.
        """
        known: dict[int, int] = {}
        for node in nodes:
            if node not in self.of_inputs:
                inside = tuple(known.get(operand, -1) for operand in self.operands[node])
                known[node] = hash((self.labels[node], inside))
        return tuple(sorted(known.values()))

    def repeats(self, nodes: Sequence[int]) -> list[RepeatedPart]:
        """Equal parts that stand side by side in `nodes`; positions are those in `nodes`."""
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
        """The repeat at `start` that covers most; of those the one with the shortest parts."""
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
        """How many of the parts, which have equal labels, hang together alike."""
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
    """How far a row of labels agrees with itself from two places on, by hashes of its starts."""

    def __init__(self, labels: Sequence[int]) -> None:
        self.labels = labels
        self.hashes, self.powers = [0], [1]
        for label in labels:
            self.hashes.append((self.hashes[-1] * _BASE + label + 1) % _MODULUS)
            self.powers.append(self.powers[-1] * _BASE % _MODULUS)
        self.following: list[int] = [-1] * len(labels)  # the next place with the same label
        last: dict[int, int] = {}
        for place in range(len(labels) - 1, -1, -1):
            self.following[place] = last.get(labels[place], -1)
            last[labels[place]] = place

    def periods(self, start: int) -> list[int]:
        """Distances to the next places with the same label that leave room for a repeat."""
        found: list[int] = []
        place = self.following[start]
        while place >= 0 and len(found) < _MOST_PERIODS and 2 * place - start <= len(self.labels):
            found.append(place - start)
            place = self.following[place]
        return found

    def common(self, one: int, other: int) -> int:
        """Labels from `one` on that are those from `other` on; `other` is the later one."""
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
