"""A graph: the nodes between given inputs and given outputs, in an order that can be run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torpor.ir.node import LEAF, SCALAR, Node, Value


class Graph:
    """Ordered nodes from inputs to outputs.

    Inputs are leaves, run-time scalars, and values computed earlier (`known`) that need not be
    computed again. Nodes stand in post-order of the first output that needs them.
    """

    __slots__ = ("inputs", "nodes", "outputs")

    def __init__(
        self, inputs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Value]
    ) -> None:
        self.inputs = tuple(inputs)
        self.nodes = tuple(nodes)
        self.outputs = tuple(outputs)

    @staticmethod
    def of(outputs: Iterable[Value], known: Collection[Value] = ()) -> Graph:
        """The graph that computes `outputs`, taking the values in `known` as inputs."""
        outputs = tuple(outputs)
        inputs: dict[Value, None] = {}
        nodes: list[Node] = []
        done: set[Node] = set()
        for output in outputs:
            _visit(output, known, inputs, nodes, done)
        return Graph(tuple(inputs), nodes, outputs)

    def __len__(self) -> int:
        return len(self.nodes)


def _visit(
    output: Value,
    known: Collection[Value],
    inputs: dict[Value, None],
    nodes: list[Node],
    done: set[Node],
) -> None:
    """Append what `output` needs, operands first, with a stack of our own."""
    stack: list[tuple[Value, bool]] = [(output, False)]
    while stack:
        value, ready = stack.pop()
        node = value.node
        if ready:
            if node not in done:
                done.add(node)
                nodes.append(node)
        elif value in known or node.op is LEAF or node.op is SCALAR:
            inputs[value] = None
        elif node not in done:
            stack.append((value, True))
            stack.extend((operand, False) for operand in reversed(node.operands))
