"""Finds the first node of a graph at which a backend goes wrong.

All values of the graph are made outputs and compared, in the order of the graph. That may prevent
fusion, and so hide a fault that fusion causes: then the graph is truncated, and the shortest prefix
that is still wrong is found by binary search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torpor.backend.interface import Backend
from torpor.debug.judge import Expected, Gap, Judge, run_graph
from torpor.debug.subgraph import ancestors, cut_out
from torpor.errors import CompileError, UnsupportedError
from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value
from torpor.ops.spec import spec_of
from torpor.text.printer import print_node

WINDOW_BYTES = 1 << 30
"""Bytes of values to compare at a time; beyond that, the graph is run again for the rest."""


@dataclass(slots=True)
class FaultyPart:
    """A part of a graph that is wrong on its own, with its inputs."""

    graph: Graph
    arguments: list[Any]
    expected: Expected


@dataclass(slots=True)
class Fault:
    """The first node at which a backend goes wrong."""

    position: int  # of the node in the graph
    length: int  # of the graph
    node: Node
    output: int
    gap: Gap
    trusted: Backend
    suspect: Backend
    hidden: bool  # it vanishes if all values are outputs: the backend's fusion is wrong
    part: FaultyPart | None  # the smallest part that reproduces it, if any

    @property
    def exact(self) -> bool:
        """Whether results must be bit-identical."""
        return self.trusted.exact and self.suspect.exact

    @property
    def op(self) -> str:
        return self.node.op.name

    @property
    def line(self) -> str | None:
        return None if self.node.site is None else str(self.node.site)

    def __str__(self) -> str:
        lines = [
            f"{self.suspect.name} differs from {self.trusted.name} first at node {self.position} "
            f"of {self.length}: {self.op}",
            f"  recorded at: {self.line or 'unknown'}",
            f"  in graph:    {print_node(self.node)}",
            f"  output {self.output}:    {self.gap}",
            f"  seen:        {self._seen()}",
        ]
        return "\n".join(lines)

    def _seen(self) -> str:
        if self.part is None:
            return "in the whole graph only"
        size = len(self.part.graph)
        if size == 1:
            return "in the node alone"
        return f"in {size} nodes together, not in fewer"

    def to_json(self) -> dict[str, Any]:
        """The fault as data for programs."""
        return {
            "node": self.position,
            "nodes": self.length,
            "op": self.op,
            "output": self.output,
            "type": repr(self.node.outputs[self.output].type),
            "line": self.line,
            "text": print_node(self.node),
            "off": repr(self.gap.off),
            "allowed": repr(self.gap.allowed),
            "trusted_off": repr(self.gap.trusted_off),
            "place": list(self.gap.place),
            "got": repr(self.gap.got),
            "expected": repr(self.gap.expected),
            "nodes_that_show_it": None if self.part is None else len(self.part.graph),
        }


def bisect(
    graph: Graph, arguments: Sequence[Any], trusted: Backend, suspect: Backend
) -> Fault | None:
    """The first node at which `suspect` goes wrong on these arguments; None if there is none."""
    _refuse_random(graph)
    search = _Search(graph, arguments, trusted, suspect)
    return search.run()


def _refuse_random(graph: Graph) -> None:
    node = drawing(graph)
    if node is not None:
        raise UnsupportedError(
            f"{node.op.name} draws random numbers when the graph runs: no two runs are alike"
        )


def drawing(graph: Graph) -> Node | None:
    """The first node that draws random numbers when the graph runs."""
    return next((n for n in graph.nodes if spec_of(n.op.target).draws(n.args)), None)


class _Search:
    """One search."""

    def __init__(
        self, graph: Graph, arguments: Sequence[Any], trusted: Backend, suspect: Backend
    ) -> None:
        self.graph = graph
        self.judge = Judge(graph, arguments, trusted)
        self.trusted = trusted
        self.suspect = suspect
        self.exact = trusted.exact and suspect.exact

    def run(self) -> Fault | None:
        whole = self._first_gap(self.graph)
        if whole is None:
            return None
        found = self._by_all_values()
        hidden = found is None
        value, gap = found or self._by_halving(whole)
        position = self.graph.nodes.index(value.node)
        part = self._smallest(value)
        return Fault(
            position, len(self.graph), value.node, value.index, self._reported(value, gap),
            self.trusted, self.suspect, hidden, part,
        )  # fmt: skip

    def _first_gap(self, graph: Graph) -> tuple[Value, Gap] | None:
        """The first wrong output of `graph`, a prefix of the whole graph."""
        wanted = [v for v in dict.fromkeys(graph.outputs) if v not in set(graph.inputs)]
        if not wanted:
            return None
        asked = Graph(graph.inputs, graph.nodes, wanted)
        got = run_graph(asked, self.judge.arguments, self.suspect)
        expected = self.judge.expected(wanted, self.exact)
        for value, tensor in zip(wanted, got, strict=True):
            gap = expected[value].gap(tensor)
            if gap is not None:
                return value, gap
        return None

    def _reported(self, value: Value, gap: Gap) -> Gap:
        """The gap in terms of double precision, even if found by comparing bits."""
        if not self.exact:
            return gap
        expected = self.judge.expected([value], exact=False)[value]
        return replace(gap, trusted_off=expected.trusted_off)

    # -- where ---------------------------------------------------------------------------------

    def _by_all_values(self) -> tuple[Value, Gap] | None:
        for last, window in self._windows():
            part = Graph(self.graph.inputs, self.graph.nodes[: last + 1], window)
            try:
                found = self._first_gap(part)
            except CompileError:  # fails with so many outputs
                return None
            if found is not None:
                return found
        return None

    def _windows(self) -> Iterator[tuple[int, list[Value]]]:
        """All values in order, in windows that fit in memory, each with its last node."""
        inputs = set(self.graph.inputs)
        window: list[Value] = []
        size = 0
        for position, node in enumerate(self.graph.nodes):
            made = [v for v in node.outputs if v.type is not None and v not in inputs]
            window += made
            size += sum(v.type.nbytes for v in made)
            if size > WINDOW_BYTES:
                yield position, window
                window, size = [], 0
        if window:
            yield len(self.graph.nodes) - 1, window

    def _by_halving(self, found: tuple[Value, Gap]) -> tuple[Value, Gap]:
        """The first wrong value in the shortest prefix of the graph that is wrong."""
        right, wrong = 0, len(self.graph.nodes)
        while wrong - right > 1:
            middle = (right + wrong) // 2
            seen = self._first_gap(self._beginning(middle))
            if seen is None:
                right = middle
            else:
                wrong, found = middle, seen
        return found

    def _beginning(self, length: int) -> Graph:
        """A prefix of the graph, with everything that the rest reads from it as outputs."""
        nodes, rest = self.graph.nodes[:length], self.graph.nodes[length:]
        made = {value for node in nodes for value in node.outputs}
        needed = [value for node in rest for value in node.operands if value in made]
        needed += [value for value in self.graph.outputs if value in made]
        order = {value: i for i, n in enumerate(nodes) for value in n.outputs}
        outputs = sorted(dict.fromkeys(needed), key=lambda v: (order[v], v.index))
        return Graph(self.graph.inputs, nodes, outputs)

    # -- minimization --------------------------------------------------------------------------

    def _smallest(self, value: Value) -> FaultyPart | None:
        """The smallest set of ancestors of a value that reproduces the fault."""
        depth, size = 0, 0
        while True:
            nodes = ancestors(self.graph, value.node, depth)
            if len(nodes) == size:
                return None  # all ancestors, and still right: other nodes are involved
            size = len(nodes)
            part = self._part(nodes, value)
            if part is not None:
                return part
            depth = 2 * depth + 1

    def _part(self, nodes: list[Node], value: Value) -> FaultyPart | None:
        graph, needed = cut_out(nodes, [value])
        known = dict(zip(self.graph.inputs, self.judge.arguments, strict=True))
        missing = [v for v in needed if v not in known]
        known.update(self.judge.values(missing) if missing else {})
        arguments = [known[v] for v in needed]
        judge = Judge(graph, arguments, self.trusted)
        wanted = list(graph.outputs)
        got = run_graph(graph, arguments, self.suspect)[0]
        if judge.expected(wanted, self.exact)[wanted[0]].gap(got) is None:
            return None
        expected = judge.expected(wanted, exact=False)[wanted[0]]
        return FaultyPart(graph, arguments, expected)
