"""The intermediate representation: interned nodes, their types, and graphs of them.

Depends only on `symbols.expressions`; every other package may import it. Printing and parsing are
exported here too, but live in `text`, which builds on this package and is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from torpor.ir.graph import Graph
from torpor.ir.node import Node, OpKind, Value
from torpor.ir.types import ScalarType, TensorType

if TYPE_CHECKING:
    from torpor.text.parser import parse_graph
    from torpor.text.printer import print_graph, print_node

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torpor.text import parser, printer

    source = parser if name == "parse_graph" else printer
    return globals().setdefault(name, getattr(source, name))
