"""Graph interpreters: a base class to subclass, with a method for each kind of thing in a graph.

`Interpreter` maps every value to something: a tensor, a name, a value of another graph.
`Copier` builds a new graph of nodes outside the intern table, which may differ from the originals.
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
    """Visits the nodes of a graph in order; `env` maps the values seen so far."""

    def __init__(self) -> None:
        self.env: dict[Value, T] = {}

    def run(self, nodes: Iterable[Node]) -> None:
        """Visit these nodes in order."""
        for node in nodes:
            made = self.node(node, tuple([self.argument(arg) for arg in node.args]))
            self.env.update(zip(node.outputs, made, strict=True))

    def node(self, node: Node, args: tuple[Any, ...]) -> Sequence[T]:
        """Map the outputs of a node, given its mapped arguments."""
        raise NotImplementedError

    def input(self, value: Value) -> T:
        """Map a value that no visited node made; called once for each."""
        raise NotImplementedError

    def constant(self, constant: Any) -> Any:
        """Map an argument that is not a value."""
        return constant

    def argument(self, arg: Any) -> Any:
        """Map an argument; tuples are mapped item by item."""
        if type(arg) is Value:
            return self.value(arg)
        if type(arg) is tuple:
            return tuple([self.argument(item) for item in arg])
        return self.constant(arg)

    def value(self, value: Value) -> T:
        """Look up a value, or map it as an input."""
        if value not in self.env:
            self.env[value] = self.input(value)
        return self.env[value]


class Copier(Interpreter[Value]):
    """Copies nodes; values from outside become leaves and scalars, numbered from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.read: list[Value] = []  # the original of each input of the copy

    def graph(self, outputs: Iterable[Value]) -> Graph:
        """The copied nodes as a graph with these outputs."""
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
        """The type of the copy of a value, given the original's."""
        return type_

    def input_type(self, value: Value) -> Any:
        """The type of the input that stands for an outside value."""
        return self.type(value.type)

    def key(self, node: Node, args: tuple[Any, ...]) -> Key:
        """The key of a node's copy."""
        return args


class AtSizes(Copier):
    """Copies nodes with their symbols replaced by concrete sizes."""

    def __init__(self, sizes: Mapping[Symbol, int]) -> None:
        super().__init__()
        self.sizes = sizes

    def type(self, type_: Any) -> Any:
        return type_at(type_, self.sizes)

    def constant(self, constant: Any) -> Any:
        return number(constant, self.sizes)


class _WithInputs(AtSizes):
    """Copies inputs too: leaves keep their slots."""

    def input(self, value: Value) -> Value:
        node = value.node
        args = node.args if node.op in (LEAF, SCALAR) else ()
        types = tuple([self.type(output.type) for output in node.outputs])
        made = PrivateNode(node.op, args, args, types, node.site, node.scope)
        self.env.update(zip(node.outputs, made.outputs, strict=True))
        return made.outputs[value.index]


def graph_at(graph: Graph, sizes: Mapping[Symbol, int]) -> Graph:
    """`graph` specialized to these sizes, with nodes of its own (not interned)."""
    copier = _WithInputs(sizes)
    inputs = [copier.value(value) for value in graph.inputs if value.node.op is not SIZE]
    copier.run(graph.nodes)
    return Graph(inputs, copier.nodes, [copier.env[value] for value in graph.outputs])
