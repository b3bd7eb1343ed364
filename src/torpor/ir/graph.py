"""A graph: the nodes between given inputs and given outputs, in an order that can be run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torpor.ir.node import LEAF, SCALAR, SIZE, Node, Value, size
from torpor.ir.sizes import Expr, Symbol, number
from torpor.ir.types import SymbolicType, type_at


class Graph:
    """Ordered nodes from inputs to outputs.

    Inputs are leaves, run-time scalars, and values computed earlier (`known`) that need not be
    computed again. Nodes stand in post-order of the first output that needs them.
    """

    __slots__ = ("inputs", "nodes", "outputs", "symbols", "types")

    def __init__(
        self, inputs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Value]
    ) -> None:
        self.inputs = tuple(inputs)
        self.nodes = tuple(nodes)
        self.outputs = tuple(outputs)
        self.types = tuple([v.type for v in self.outputs])
        self.symbols: tuple[Symbol, ...] = tuple(  # those that are inputs
            [v.node.args[0] for v in self.inputs if v.node.op is SIZE]
        )

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

    def in_order_of(self, nodes: Iterable[Node]) -> Graph:
        """The same graph, its nodes in the order in which they stand in `nodes`."""
        needed = set(self.nodes)
        return Graph(self.inputs, [node for node in nodes if node in needed], self.outputs)

    def __len__(self) -> int:
        return len(self.nodes)

    def with_sizes(self) -> Graph:
        """The same graph, with the symbols in it as inputs after all others."""
        symbols = _symbols_in(self)
        if not symbols:
            return self
        return Graph((*self.inputs, *map(size, symbols)), self.nodes, self.outputs)

    def at(self, sizes: Mapping[Symbol, int]) -> Graph:
        """The same graph for these sizes, of nodes that nobody else knows."""
        values: dict[Value, Value] = {}

        def there(arg: Any) -> Any:
            if type(arg) is Value:
                return values[arg]
            if type(arg) is tuple:
                return tuple([there(item) for item in arg])
            return number(arg, sizes)

        def copied(node: Node, args: tuple[Any, ...]) -> None:
            types = tuple([type_at(v.type, sizes) for v in node.outputs])
            made = Node(node.op, args, args, types, node.site, node.scope)
            values.update(zip(node.outputs, made.outputs, strict=True))

        inputs = [v for v in self.inputs if v.node.op is not SIZE]
        for value in inputs:
            if value.node.outputs[value.index] not in values:
                copied(value.node, value.node.args if value.node.op in (LEAF, SCALAR) else ())
        for node in self.nodes:
            copied(node, there(node.args))
        nodes = [values[node.outputs[0]].node for node in self.nodes]
        return Graph([values[v] for v in inputs], nodes, [values[v] for v in self.outputs])


def _symbols_in(graph: Graph) -> list[Symbol]:
    """The symbols of a graph, in an order that does not depend on how a process numbers them.

    First those that are a size somewhere, as they are met; few are only part of expressions.
    """
    alone: dict[Symbol, None] = {}
    parts: set[Symbol] = set()
    for each in _expressions_in(graph):
        if len(each.symbols) == 1 and each is each.symbols[0].expr:
            alone[each.symbols[0]] = None
        else:
            parts.update(each.symbols)
    return [*alone, *sorted(parts - alone.keys())]


def _expressions_in(graph: Graph) -> Iterator[Expr]:
    for value in graph.inputs:
        yield from _expressions_of(value.type)
    for node in graph.nodes:
        yield from _expressions_among(node.args)
        for output in node.outputs:
            yield from _expressions_of(output.type)


def _expressions_of(type_: Any) -> Iterator[Expr]:
    if type(type_) is SymbolicType:
        yield from _expressions_among((*type_.sizes, *type_.steps, type_.at_offset_size))


def _expressions_among(items: tuple[Any, ...]) -> Iterator[Expr]:
    for item in items:
        if type(item) is Expr:
            yield item
        elif type(item) is tuple:
            yield from _expressions_among(item)


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
