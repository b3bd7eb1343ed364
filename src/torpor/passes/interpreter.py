"""One way to walk a graph: a class to subclass, with a method for each kind of thing.

`Interpreter` maps every value to something: a tensor, a name, a value of another graph.
`Copier` makes a graph of nodes that no table knows, which may differ from those it copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, SCALAR, SIZE, Key, Node, PrivateNode, Value
from torpor.ir.types import ScalarType, type_at
from torpor.symbols.expressions import Symbol, number

T = TypeVar("T")


class Interpreter(Generic[T]):
    """Takes the nodes of a graph in order; `env` maps the values so far."""

    def __init__(self) -> None:
        self.env: dict[Value, T] = {}

    def run(self, nodes: Iterable[Node]) -> None:
        """Take these nodes, one after the other."""
        for node in nodes:
            made = self.node(node, tuple([self.argument(arg) for arg in node.args]))
            self.env.update(zip(node.outputs, made, strict=True))

    def node(self, node: Node, args: tuple[Any, ...]) -> Sequence[T]:
        """What the outputs of a node map to, given its mapped arguments."""
        raise NotImplementedError

    def input(self, value: Value) -> T:
        """What a value that no node made maps to; asked for once."""
        raise NotImplementedError

    def constant(self, constant: Any) -> Any:
        """What an argument that is no value maps to."""
        return constant

    def argument(self, arg: Any) -> Any:
        """What an argument maps to; for a tuple, that of its items."""
        if type(arg) is Value:
            return self.value(arg)
        if type(arg) is tuple:
            return tuple([self.argument(item) for item in arg])
        return self.constant(arg)

    def value(self, value: Value) -> T:
        """What a value maps to."""
        if value not in self.env:
            self.env[value] = self.input(value)
        return self.env[value]


class Copier(Interpreter[Value]):
    """Copies nodes; values that none of them makes become leaves and scalars, numbered anew."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.read: list[Value] = []  # the values that the inputs of the copy replace

    def graph(self, outputs: Iterable[Value]) -> Graph:
        """What was copied, with these values as its outputs."""
        results = [self.value(value) for value in outputs]
        return Graph([self.env[value] for value in self.read], self.nodes, results)

    def input(self, value: Value) -> Value:
        type_, place = self.input_type(value), len(self.read)
        self.read.append(value)
        if isinstance(type_, ScalarType):
            return PrivateNode(SCALAR, (place, type_.kind), (place,), (type_,)).outputs[0]
        return PrivateNode(LEAF, (place, type_), (place,), (type_,)).outputs[0]

    def node(self, node: Node, args: tuple[Any, ...]) -> Sequence[Value]:
        types = tuple([self.type(value.type) for value in node.outputs])
        made = PrivateNode(node.op, self.key(node, args), args, types, node.site, node.scope)
        self.nodes.append(made)
        return made.outputs

    def type(self, type_: Any) -> Any:
        """The type of the copy of a value."""
        return type_

    def input_type(self, value: Value) -> Any:
        """The type of the input that replaces a value."""
        return self.type(value.type)

    def key(self, node: Node, args: tuple[Any, ...]) -> Key:
        """The key of the copy of a node."""
        return args


class AtSizes(Copier):
    """Copies nodes for sizes of their symbols."""

    def __init__(self, sizes: Mapping[Symbol, int]) -> None:
        super().__init__()
        self.sizes = sizes

    def type(self, type_: Any) -> Any:
        return type_at(type_, self.sizes)

    def constant(self, constant: Any) -> Any:
        return number(constant, self.sizes)


class _WithInputs(AtSizes):
    """Copies inputs too: a leaf has the same slot."""

    def input(self, value: Value) -> Value:
        node = value.node
        args = node.args if node.op in (LEAF, SCALAR) else ()
        types = tuple([self.type(output.type) for output in node.outputs])
        made = PrivateNode(node.op, args, args, types, node.site, node.scope)
        self.env.update(zip(node.outputs, made.outputs, strict=True))
        return made.outputs[value.index]


def graph_at(graph: Graph, sizes: Mapping[Symbol, int]) -> Graph:
    """The same graph for these sizes, of nodes that nobody else knows."""
    copier = _WithInputs(sizes)
    inputs = [copier.value(value) for value in graph.inputs if value.node.op is not SIZE]
    copier.run(graph.nodes)
    return Graph(inputs, copier.nodes, [copier.env[value] for value in graph.outputs])
