"""The intermediate representation: interned nodes, their types, graphs of them, and their text."""

from torpor.ir.graph import Graph
from torpor.ir.node import Node, OpKind, Value
from torpor.ir.parser import parse_graph
from torpor.ir.printer import print_graph, print_node
from torpor.ir.types import ScalarType, TensorType

__all__ = [
    "Graph",
    "Node",
    "OpKind",
    "ScalarType",
    "TensorType",
    "Value",
    "parse_graph",
    "print_graph",
    "print_node",
]
